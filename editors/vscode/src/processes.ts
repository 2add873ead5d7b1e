/** Runs a program to its end. Knows nothing of what it does. */

import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';

export interface Surroundings {
  /** Where it runs: a folder of ours, since `python -m` and pip look at what lies there. */
  folder: string;
  environment?: NodeJS.ProcessEnv;
  /** Gets each line that it prints, on stdout or stderr. */
  line?: (line: string) => void;
  /** Ends it, with all that it started. */
  signal?: AbortSignal;
}

/** It ended otherwise than well; the message says how, `printed` what it had printed. */
export class Failed extends Error {
  constructor(
    message: string,
    readonly printed: string,
  ) {
    super(message);
  }
}

/** What would send packages elsewhere than into the environment that they are meant for. */
const misleading = /^(PYTHON\w*|VIRTUAL_ENV|PIP_(USER|TARGET|PREFIX|ROOT|PYTHON|REQUIRE_VIRTUALENV)|UV_(PYTHON|PROJECT\w*))$/;

/** What it printed. Rejects with `Failed`. */
export async function run(program: string, given: string[], at: Surroundings): Promise<string> {
  const inherited = Object.entries(process.env).filter(([name]) => !misleading.test(name));
  const environment = { ...Object.fromEntries(inherited), ...at.environment };
  const printed: string[] = [];
  return await new Promise((resolve, reject) => {
    const process_ = spawn(program, given, {
      cwd: at.folder,
      env: environment,
      stdio: ['ignore', 'pipe', 'pipe'],
      detached: process.platform !== 'win32', // A group of its own, so that what it started ends with it.
    });
    const readers = [process_.stdout, process_.stderr].map((stream) => createInterface({ input: stream }));
    readers.forEach((reader) =>
      reader.on('line', (line) => {
        printed.push(line);
        at.line?.(line);
      }),
    );
    const end = (): void => {
      try {
        process.kill(process.platform === 'win32' ? (process_.pid ?? 0) : -(process_.pid ?? 0), 'SIGTERM');
      } catch {
        // It ended by itself meanwhile.
      }
    };
    at.signal?.addEventListener('abort', end, { once: true });
    process_.on('error', (error) => reject(new Failed(error.message, printed.join('\n'))));
    process_.on('close', (code, signal) => {
      at.signal?.removeEventListener('abort', end);
      const all = printed.join('\n');
      if (at.signal?.aborted) {
        reject(new Failed('it was stopped', all));
      } else if (code === 0) {
        resolve(all);
      } else {
        reject(new Failed(signal === null ? `it ended with code ${code}` : `it was ended by ${signal}`, all));
      }
    });
  });
}
