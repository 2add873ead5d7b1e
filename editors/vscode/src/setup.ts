/** Sets up what the extension runs, in two stages, and takes it away: the server at once, the engine once it is agreed to.
 *
 * What is to be done, with which commands, and where it lies, other modules know; here a person is asked and told.
 */

import { createHash } from 'node:crypto';
import { mkdir, readdir, readFile, rm, statfs } from 'node:fs/promises';
import { join } from 'node:path';
import * as vscode from 'vscode';

import { Environments, type Environment } from './environments';
import {
  complaint,
  creating,
  installingEngine,
  installingServer,
  step,
  type Bundle,
  type Command,
  type Tool,
  type Variant,
} from './installer';
import { sayProblem } from './problems';
import { Failed, run } from './processes';
import { onPath } from './program';
import { choose, names, NoPython } from './python';
import { allData, bytesOf, engineSizes, inWords, offer } from './sizes';
import { next, variants, type Step } from './stage';
import type { ServerStatus } from './status';

/** Bytes of the server's environment, to be free: it takes 80 MB. */
const serverBytes = 200e6;
/** Bytes beneath which nothing worth showing was downloaded: pip's own unpacked parts. */
const smallest = 5e6;

/** What a person chose by settings. */
function chosen(name: string): string {
  return vscode.workspace.getConfiguration('infill').get<string>(name, '').trim();
}

interface Told {
  report(message: string, downloaded?: number): void;
  signal: AbortSignal;
}

export class Setup implements vscode.Disposable {
  /** How the set-up is, where that is all there is to say; undefined once nothing is left to do. */
  status: ServerStatus | undefined;
  private bundle: Bundle | undefined;
  private environments: Environments | undefined;
  /** What was agreed to since the window was loaded. */
  private agreed: Variant | undefined;
  /** All data was removed: nothing is made again till the window is loaded anew, or a person says so. */
  private removed = false;
  /** Ends what is being made when the window goes. */
  private readonly going = new AbortController();

  /** changed: is told when `status` is another one. */
  constructor(
    private readonly context: vscode.ExtensionContext,
    private readonly log: vscode.LogOutputChannel,
    private readonly changed: () => void,
  ) {}

  /** What the server is told beside the settings that a person made: where the engine is, or that there is none yet. */
  get settings(): { enabled?: false; engine?: { python: string } } {
    if (this.removed) {
      return { enabled: false };
    }
    if (chosen('server.path') !== '' || isElsewhere() || this.environments === undefined) {
      return {};
    }
    const { engine } = this.environments;
    return engine.isReady ? { engine: { python: engine.python } } : { enabled: false };
  }

  /** The first stage: the server's program, made where it is missing; undefined where that failed, which was said. */
  async server(): Promise<string | undefined> {
    if (this.removed) {
      return undefined;
    }
    const path = chosen('server.path');
    if (path !== '') {
      this.say(undefined);
      return path;
    }
    try {
      const { server } = await this.open();
      if ((await this.next()) === 'server') {
        await this.making(server, 'the server', (told, tool, python) => this.fill(server, told, tool, python));
      }
      this.say(undefined);
      await this.tidy('server');
      return server.program;
    } catch (error) {
      this.failed('Infill cannot set up its server', error);
      return undefined;
    }
  }

  /** The second stage, as far as it is agreed to. Whether there is an engine now that was not there before. */
  async engine(): Promise<boolean> {
    try {
      const step = await this.next();
      if (step === 'done') {
        await this.tidy('engine');
        this.say(undefined);
      } else if (step === 'ask' || step === 'wait') {
        this.say({ state: 'off', message: 'the engine is not installed' });
      }
      if (step === 'ask') {
        this.agreed = await this.ask();
      }
      if ((await this.next()) !== 'engine') {
        return false;
      }
      const all = await this.open();
      const { engine } = all;
      const variant = this.agreed ?? (await all.agreed()) ?? 'cpu';
      await this.making(engine, 'the engine', (...tools) => this.fill(engine, ...tools, variant), variant);
      await this.tidy('engine');
      this.say(undefined);
      return true;
    } catch (error) {
      this.failed('Infill cannot install its engine', error);
      return false;
    }
  }

  /** Removes what the extension, the server and the engine keep, after a person saw how much it is.
   *
   * stop: ends the server, and the engine that it uses. */
  async removeData(stop: () => Promise<void>): Promise<void> {
    if (this.status?.state === 'fetching') {
      void vscode.window.showWarningMessage('Infill: a set-up is under way. Cancel it, or wait for its end, and try again.');
      return;
    }
    const environments = this.context.globalStorageUri.fsPath;
    const data = await allData(environments);
    const sized = await Promise.all(
      data.map(async ({ name, paths }) => ({ name, bytes: (await Promise.all(paths.map(bytesOf))).reduce((a, b) => a + b, 0) })),
    );
    const sum = sized.reduce((total, { bytes }) => total + bytes, 0);
    const detail = [
      ...sized.map(({ name, bytes }) => `${name}: ${inWords(bytes)}`),
      '',
      'Other editors on this machine use the model and the index, too; they make them again when they need them.',
    ].join('\n');
    const yes = 'Remove';
    const question = `Remove all data of Infill (${inWords(sum)})?`;
    if ((await vscode.window.showWarningMessage(question, { modal: true, detail }, yes)) !== yes) {
      return;
    }
    this.removed = true;
    this.agreed = undefined;
    const location = vscode.ProgressLocation.Notification;
    await vscode.window.withProgress({ location, title: 'Infill: removing its data' }, async () => {
      await stop();
      const all = await this.open().catch(() => undefined);
      for (const one of all === undefined ? [] : [all.engine, all.server, ...(await all.others())]) {
        await this.remove(one);
      }
      for (const path of data.flatMap(({ paths }) => paths)) {
        await rm(path, { recursive: true, force: true, maxRetries: 3 });
      }
    });
    this.log.info(`removed all data, ${inWords(sum)}`);
    this.say({ state: 'off', message: 'all data was removed; "Set up" in the menu starts anew' });
    const again = 'Set up anew';
    const answer = await vscode.window.showInformationMessage(`Infill: ${inWords(sum)} removed.`, again, 'Uninstall');
    if (answer === again) {
      await vscode.commands.executeCommand('infill.setUp');
    } else if (answer !== undefined) {
      await vscode.commands.executeCommand('workbench.extensions.uninstallExtension', this.context.extension.id);
    }
  }

  /** A person wants all of it, whatever they said before. */
  async wanted(): Promise<void> {
    this.removed = false;
    await this.environments?.putOff(false);
  }

  dispose(): void {
    this.going.abort();
  }

  private async next(): Promise<Step> {
    const path = chosen('server.path');
    if (path !== '') {
      return 'done';
    }
    const all = await this.open();
    return next({
      serverPath: path,
      engineElsewhere: isElsewhere(),
      serverIsReady: all.server.isReady,
      engineIsReady: all.engine.isReady,
      agreed: this.agreed ?? (await all.agreed()),
      putOff: all.isPutOff,
    });
  }

  /** The environments of this version, known by what they are made from. Rejects where the extension carries nothing. */
  private async open(): Promise<Environments> {
    if (this.environments === undefined) {
      const folder = vscode.Uri.joinPath(this.context.extensionUri, 'bundled').fsPath;
      const wheel = (await readdir(folder).catch(() => [])).find((name) => name.endsWith('.whl'));
      if (wheel === undefined) {
        throw new Error('this copy of the extension carries no server: package it anew, or set infill.server.path');
      }
      this.bundle = { wheel: join(folder, wheel), constraints: join(folder, 'constraints.txt') };
      const digest = createHash('sha256').update(await readFile(this.bundle.wheel)).digest('hex').slice(0, 8);
      const { version } = this.context.extension.packageJSON as { version: string };
      this.environments = new Environments(this.context.globalStorageUri.fsPath, `${version}-${digest}`);
    }
    return this.environments;
  }

  /** Shows progress while an environment is made, which a person may stop. */
  private async making(
    environment: Environment,
    what: string,
    fill: (told: Told, tool: Tool, python: string) => Promise<void>,
    variant?: Variant,
  ): Promise<void> {
    if (process.platform === 'win32') {
      throw new Error('it does not run on Windows itself: open the folder in WSL, or set infill.server.path');
    }
    const bytes = variant === undefined ? serverBytes : engineSizes[variant].disk;
    const options = { location: vscode.ProgressLocation.Notification, title: `Infill: setting up ${what}`, cancellable: true };
    await vscode.window.withProgress(options, async (progress, token) => {
      const cancel = new AbortController();
      token.onCancellationRequested(() => cancel.abort());
      const signal = AbortSignal.any([cancel.signal, this.going.signal]);
      const download = variant === undefined ? undefined : engineSizes[variant].download;
      const report = (message: string, downloaded = 0): void => {
        const share = download && downloaded ? Math.min(downloaded / download, 0.99) : null;
        const words = downloaded && download ? `${message}, ${inWords(downloaded)} of about ${inWords(download)}` : message;
        progress.report({ message: words });
        this.say({ state: 'fetching', progress: share, message: `setting up ${what}: ${words}` });
      };
      report('looking for a Python');
      await mkdir(this.context.globalStorageUri.fsPath, { recursive: true });
      await this.needRoom(bytes);
      const { tool, python } = await this.tools(signal);
      this.log.info(`setting up ${what} with ${tool.name} and ${python} in ${environment.folder}`);
      await environment.make(() => fill({ report, signal }, tool, python), { variant, signal });
      this.log.info(`${what} is set up`);
    });
  }

  /** Runs the commands of one environment, one after another. */
  private async fill(environment: Environment, told: Told, tool: Tool, python: string, variant?: Variant): Promise<void> {
    const { folder } = environment;
    const bundle = this.bundle as Bundle;
    const installing =
      variant === undefined
        ? [installingServer(tool, folder, bundle)]
        : installingEngine(tool, folder, bundle, chosen('install.torchIndex'), variant);
    const downloads = `${folder}.tmp`;
    await mkdir(downloads, { recursive: true });
    try {
      let downloaded = 0;
      for (const command of [creating(tool, python, folder), ...installing]) {
        downloaded += await this.carryOut(command, told, downloads, downloaded);
      }
    } finally {
      await rm(downloads, { recursive: true, force: true });
    }
  }

  /** The bytes that were downloaded, which is what lay in `downloads`: pip's own bar is not for programs in all its
   * versions. before: those of the commands before. */
  private async carryOut({ what, program, given }: Command, told: Told, downloads: string, before: number): Promise<number> {
    let doing = '';
    let most = 0;
    told.report(what, before);
    this.log.info([program, ...given].join(' '));
    const watching = setInterval(() => {
      void bytesOf(downloads).then((bytes) => {
        most = Math.max(most, bytes > smallest ? bytes : 0);
        told.report([what, doing].filter(Boolean).join(', '), before + most);
      });
    }, 500);
    try {
      await run(program, given, {
        folder: downloads,
        environment: { TMPDIR: downloads },
        signal: told.signal,
        line: (line) => {
          this.log.info(line);
          doing = step(line) ?? doing;
        },
      });
      return most;
    } catch (error) {
      const reason = error instanceof Failed && !told.signal.aborted ? complaint(error.printed || error.message) : 'it was stopped';
      throw new Error(`${what} could not be installed: ${reason}`);
    } finally {
      clearInterval(watching);
    }
  }

  private async needRoom(bytes: number): Promise<void> {
    const { bavail, bsize } = await statfs(this.context.globalStorageUri.fsPath);
    if (bavail * bsize < bytes) {
      throw new Error(`${inWords(bytes)} have to be free on the disk, and ${inWords(bavail * bsize)} are`);
    }
  }

  /** What installs, and the Python to install for. */
  private async tools(signal: AbortSignal): Promise<{ tool: Tool; python: string }> {
    const wanted = chosen('install.tool');
    const uv = wanted === 'pip' ? undefined : onPath('uv');
    if (wanted === 'uv' && uv === undefined) {
      throw new Error('uv is not on the PATH: install it, or set infill.install.tool to "pip"');
    }
    const tool: Tool = uv === undefined ? { name: 'pip' } : { name: 'uv', program: uv };
    const python = chosen('install.python');
    const programs = python === '' ? [...(await ofPythonExtension()), ...names.flatMap((name) => onPath(name) ?? [])] : [python];
    const folder = this.context.globalStorageUri.fsPath;
    try {
      const found = await choose(programs, {
        ask: (program, given) => run(program, given, { folder, signal }),
        chosen: python !== '',
        needsPip: tool.name === 'pip',
        osRelease: await readFile('/etc/os-release', 'utf8').catch(() => ''),
      });
      return { tool, python: found.program };
    } catch (error) {
      if (error instanceof NoPython && tool.name === 'uv' && python === '') {
        return { tool, python: '3.12' }; // uv has Pythons of its own, and fetches one where it is set to.
      }
      throw error;
    }
  }

  /** Shows the size, and returns what is agreed to. */
  private async ask(): Promise<Variant | undefined> {
    const offered = variants(chosen('device') || 'auto', onPath('nvidia-smi') !== undefined);
    const words = { cpu: 'Install without GPU', gpu: 'Install for the GPU' };
    const buttons = offered.length === 1 ? ['Install'] : offered.map((variant) => words[variant]);
    const notNow = 'Not now';
    const answer = await vscode.window.showInformationMessage(offer(offered, chosen('install.torchIndex')), ...buttons, notNow);
    await this.environments?.putOff(answer === notNow);
    return offered[buttons.indexOf(answer ?? '')];
  }

  /** Removes what other versions left, once this one has its own. */
  private async tidy(kind: 'server' | 'engine'): Promise<void> {
    for (const old of (await this.environments?.others()) ?? []) {
      if (old.kind === kind) {
        await this.remove(old);
        this.log.info(`removed ${old.folder}, which another version had made`);
      }
    }
  }

  /** An engine that runs from there ends first. */
  private async remove(environment: Environment): Promise<void> {
    if (environment.kind === 'engine' && environment.isReady) {
      const folder = this.context.globalStorageUri.fsPath;
      const model = vscode.workspace.getConfiguration('infill').inspect<string>('model')?.globalValue;
      const named = model === undefined ? [] : ['--model', model];
      await run(environment.python, ['-I', '-m', 'infill_engine', 'stop', ...named], { folder }).catch((error) =>
        this.log.warn(`the engine in ${environment.folder} does not stop: ${String(error)}`),
      );
    }
    await environment.remove();
  }

  private failed(what: string, error: unknown): void {
    if (this.going.signal.aborted) {
      return;
    }
    const { name, message } = error instanceof Error ? error : new Error(String(error));
    const reason = name === 'AbortError' ? 'it was stopped' : message;
    this.log.error(`${what}: ${reason}`);
    this.say({ state: 'error', message: reason });
    void sayProblem(`${what}: ${reason}`, 'Retry', 'infill.setUp');
  }

  private say(status: ServerStatus | undefined): void {
    this.status = status;
    this.changed();
  }
}

/** A person has an engine of their own. */
function isElsewhere(): boolean {
  return chosen('engine.python') !== '' || chosen('engine.address') !== '';
}

/** The Python that is chosen in the Python extension, which in a folder that is not trusted may be the folder's. */
async function ofPythonExtension(): Promise<string[]> {
  const extension = vscode.extensions.getExtension<PythonApi>('ms-python.python');
  if (extension === undefined || !vscode.workspace.isTrusted) {
    return [];
  }
  try {
    const { environments } = await extension.activate();
    const found = await environments.resolveEnvironment(environments.getActiveEnvironmentPath());
    const program = found?.executable.uri?.fsPath;
    return program === undefined ? [] : [program];
  } catch {
    return []; // It is another extension's to work, and there are other places to look.
  }
}

/** What is used of it: https://github.com/microsoft/vscode-python-extension-api */
interface PythonApi {
  environments: {
    getActiveEnvironmentPath(): unknown;
    resolveEnvironment(path: unknown): Promise<{ executable: { uri: vscode.Uri | undefined } } | undefined>;
  };
}
