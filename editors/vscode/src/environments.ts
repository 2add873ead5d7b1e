/** The Python environments of one machine: the server's and the engine's, each by the version of the extension.
 *
 * One is ready once it is whole: what was interrupted is made anew. Several windows do not make the same one at once. It
 * knows neither what is installed in one nor any editor.
 */

import { randomUUID } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { link, mkdir, readdir, readFile, rename, rm, stat, utimes, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

import { programOf, type Variant } from './installer';
import { isProgram } from './program';

export type Kind = 'server' | 'engine';

const marker = 'infill.json';
/** How often a lock is looked at, and how often its owner touches it. */
const [pollMs, beatMs] = [200, 2_000];

export class Environment {
  constructor(
    readonly folder: string,
    readonly kind: Kind,
  ) {}

  get python(): string {
    return programOf(this.folder, 'python');
  }

  /** The language server. */
  get program(): string {
    return programOf(this.folder, 'infill-lsp');
  }

  /** Whole, with a Python that is there still: it belongs to the system, which may replace it. */
  get isReady(): boolean {
    return this.marked !== undefined && isProgram(this.python);
  }

  /** Which engine was agreed to, where one was made here. */
  get variant(): Variant | undefined {
    return this.marked?.variant;
  }

  private get marked(): { variant?: Variant } | undefined {
    try {
      return JSON.parse(readFileSync(join(this.folder, marker), 'utf8')) as { variant?: Variant };
    } catch {
      return undefined;
    }
  }

  /** Makes it by `fill`, unless another window has done so meanwhile. What is left of a failure is no ready one. */
  async make(fill: () => Promise<void>, { variant, signal }: { variant?: Variant; signal?: AbortSignal } = {}): Promise<void> {
    await mkdir(join(this.folder, '..'), { recursive: true });
    const release = await lock(`${this.folder}.lock`, signal);
    try {
      if (!this.isReady) {
        await rm(this.folder, { recursive: true, force: true });
        await fill();
        await writeFile(join(this.folder, marker), JSON.stringify({ variant }));
      }
    } finally {
      await release();
    }
  }

  async remove(): Promise<void> {
    // Without the marker first: a removal that is interrupted leaves no ready one.
    await rm(join(this.folder, marker), { force: true });
    await rm(this.folder, { recursive: true, force: true, maxRetries: 3 });
  }
}

export class Environments {
  readonly server: Environment;
  readonly engine: Environment;

  /** version: what tells one installation of the extension from another; fit for a file's name. */
  constructor(
    readonly folder: string,
    version: string,
  ) {
    this.server = new Environment(join(folder, `server-${version}`), 'server');
    this.engine = new Environment(join(folder, `engine-${version}`), 'engine');
  }

  /** Whether the answer to the engine's size was "not now". It is kept here, since it goes with all the rest. */
  get isPutOff(): boolean {
    return existsSync(join(this.folder, 'not-now'));
  }

  async putOff(yes: boolean): Promise<void> {
    const file = join(this.folder, 'not-now');
    await (yes ? writeFile(file, '') : rm(file, { force: true }));
  }

  /** Those of other versions. */
  async others(): Promise<Environment[]> {
    const entries = await readdir(this.folder, { withFileTypes: true }).catch(() => []);
    const folders = entries.filter((entry) => entry.isDirectory()).map(({ name }) => name);
    return folders.flatMap((name) => {
      const [, kind] = /^(server|engine)-/.exec(name) ?? [];
      const folder = join(this.folder, name);
      const isOurs = [this.server, this.engine].some((one) => one.folder === folder);
      return kind === undefined || isOurs ? [] : [new Environment(folder, kind as Kind)];
    });
  }

  /** Which engine was agreed to, in this version or another. */
  async agreed(): Promise<Variant | undefined> {
    const engines = [this.engine, ...(await this.others())];
    return engines.map((one) => one.variant).find((variant) => variant !== undefined);
  }
}

/** Waits for a file that only one process may have, and returns what gives it back.
 *
 * Its owner touches it again and again: another process may have the number of one that is gone. patienceMs: after how
 * long without that it counts as left. */
export async function lock(path: string, signal: AbortSignal | undefined, patienceMs = 15_000): Promise<() => Promise<void>> {
  const name = `${process.pid} ${randomUUID()}`;
  const mine = `${path}.${randomUUID()}`;
  await writeFile(mine, name);
  let [seen, unchanged] = ['', 0];
  try {
    for (;;) {
      if (await claims(() => link(mine, path))) {
        const beat = setInterval(() => void utimes(path, new Date(), new Date()).catch(() => undefined), beatMs);
        return async () => {
          clearInterval(beat);
          await rm(path, { force: true });
        };
      }
      const owner = await readFile(path, 'utf8').catch(() => '');
      const touched = `${owner} ${(await stat(path).catch(() => undefined))?.mtimeMs}`;
      [seen, unchanged] = [touched, touched === seen ? unchanged + 1 : 0];
      // Counted in looks and not in time: a computer that sleeps lets nobody touch it, nor look.
      if (owner !== '' && (!isRunning(Number.parseInt(owner, 10)) || unchanged * pollMs > patienceMs)) {
        await takeAway(path, owner);
      } else {
        await sleep(pollMs, undefined, { signal });
      }
    }
  } finally {
    await rm(mine, { force: true });
  }
}

/** Whether it could be claimed: the file was not there yet. */
async function claims(take: () => Promise<void>): Promise<boolean> {
  try {
    await take(); // At once with its owner's name in it.
    return true;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') {
      throw error;
    }
    return false;
  }
}

/** Removes the lock of an owner that is gone, and no other's: somebody else may have been faster, and taken it. */
async function takeAway(path: string, owner: string): Promise<void> {
  const aside = `${path}.${randomUUID()}`;
  await rename(path, aside).catch(() => undefined);
  if ((await readFile(aside, 'utf8').catch(() => owner)) !== owner) {
    await claims(() => link(aside, path));
  }
  await rm(aside, { force: true });
}

function isRunning(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
}
