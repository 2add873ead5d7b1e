/** Where the server's program is. Looks, and starts nothing. */

import { accessSync, constants, statSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import { workspace } from 'vscode';

const program = process.platform === 'win32' ? 'infill-lsp.exe' : 'infill-lsp';

export type Server = { found: true; path: string } | { found: false; problem: string };

/** The program named by `infill.server.path`; if that is empty, the first one on the PATH. */
export function findServer(): Server {
  const chosen = workspace.getConfiguration('infill').get<string>('server.path', '').trim();
  if (chosen !== '') {
    return isProgram(chosen)
      ? { found: true, path: chosen }
      : { found: false, problem: `infill.server.path is ${chosen}, which is not a program.` };
  }
  const candidates = (process.env['PATH'] ?? '').split(delimiter).map((folder) => join(folder, program));
  const path = candidates.find(isProgram);
  return path !== undefined
    ? { found: true, path }
    : { found: false, problem: `${program} is not on the PATH: install it (see docs/editors.md), or set infill.server.path.` };
}

function isProgram(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false;
  }
}
