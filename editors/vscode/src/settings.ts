/** What the server is told. It rejects settings that it does not know, so what is ours alone stays here. */

import { workspace } from 'vscode';

/** The settings that the manifest declares, but for `infill.server`, as the nested object the server expects.
 *
 * Only these: a workspace could bring others, and the server would believe that a person chose them.
 */
export function serverSettings(): Record<string, unknown> {
  const configuration = workspace.getConfiguration('infill');
  const python = configuration.get<string>('engine.python', '');
  return {
    enabled: configuration.get('enabled'),
    model: configuration.get('model'),
    maxLines: configuration.get('maxLines'),
    deadline: {
      automatic: configuration.get('deadline.automatic'),
      invoked: configuration.get('deadline.invoked'),
    },
    ...(python === '' ? {} : { engine: { python } }),
    priming: {
      enabled: configuration.get('priming.enabled'),
      exclude: configuration.get('priming.exclude'),
    },
    logLevel: configuration.get('logLevel'),
  };
}
