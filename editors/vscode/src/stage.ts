/** What the set-up has to do next. Knows no editor and no disk. */

import type { Variant } from './installer';

/** What is known of an installation. */
export interface Known {
  /** `infill.server.path`. */
  serverPath: string;
  /** `infill.engine.python` or `infill.engine.address` is set: the engine is not the extension's. */
  engineElsewhere: boolean;
  serverIsReady: boolean;
  engineIsReady: boolean;
  /** What a person once agreed to: an engine of another version is here, or was. */
  agreed: Variant | undefined;
  /** "Not now" was the answer. */
  putOff: boolean;
}

/** server: make its environment. ask: show the engine's size. engine: make its environment. wait: for a person.
 * done: there is nothing to make. */
export type Step = 'server' | 'ask' | 'engine' | 'wait' | 'done';

export function next(known: Known): Step {
  if (known.serverPath !== '') {
    return 'done';
  }
  if (!known.serverIsReady) {
    return 'server';
  }
  if (known.engineElsewhere || known.engineIsReady) {
    return 'done';
  }
  if (known.agreed !== undefined) {
    return 'engine';
  }
  return known.putOff ? 'wait' : 'ask';
}

/** Which engines a person can choose from, the one that is meant first. device: the setting `infill.device`. */
export function variants(device: string, hasNvidia: boolean): Variant[] {
  if (device.startsWith('cuda')) {
    return ['gpu'];
  }
  return device === 'auto' && hasNvidia ? ['gpu', 'cpu'] : ['cpu'];
}
