/** What the server is told. It rejects settings that it does not know, so what is the extension's alone stays here. */

import { workspace, type Uri } from 'vscode';

import manifest from '../package.json';

/** The server's settings are the first section of the manifest, which is made from the server's own definition. */
const shared = manifest.contributes.configuration[0]?.properties ?? {};
const names = Object.keys(shared).map((name) => name.slice('infill.'.length));

/** What a person set for a folder, or for none, as the nested object that the server expects.
 *
 * Not the defaults: those would hide what `infill.toml` says. Only names of the manifest: a workspace could bring others,
 * and the server would believe that a person chose them. own: what the extension says itself, which holds over that.
 */
export function serverSettings(folder?: Uri, own: object = {}): object {
  const configuration = workspace.getConfiguration('infill', folder);
  const settings: Nested = {};
  for (const name of names) {
    const found = configuration.inspect(name);
    if ((found?.workspaceFolderValue ?? found?.workspaceValue ?? found?.globalValue) !== undefined) {
      put(settings, name.split('.'), configuration.get(name));
    }
  }
  for (const [name, value] of Object.entries(own)) {
    settings[name] = isNested(value) ? { ...(settings[name] as Nested | undefined), ...value } : value;
  }
  return settings;
}

function isNested(value: unknown): value is Nested {
  return typeof value === 'object' && value !== null;
}

interface Nested {
  [name: string]: unknown;
}

function put(settings: Nested, [first = '', ...rest]: string[], value: unknown): void {
  if (rest.length === 0) {
    settings[first] = value;
  } else {
    put((settings[first] ??= {}) as Nested, rest, value);
  }
}
