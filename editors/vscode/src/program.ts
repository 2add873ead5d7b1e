/** Where a program is. Looks, and starts nothing. */

import { accessSync, constants, statSync } from 'node:fs';
import { delimiter, join } from 'node:path';

const suffix = process.platform === 'win32' ? '.exe' : '';

/** The first one of that name on the PATH. */
export function onPath(name: string): string | undefined {
  const folders = (process.env['PATH'] ?? '').split(delimiter);
  return folders.map((folder) => join(folder, name + suffix)).find(isProgram);
}

export function isProgram(path: string): boolean {
  try {
    accessSync(path, constants.X_OK);
    return statSync(path).isFile();
  } catch {
    return false;
  }
}
