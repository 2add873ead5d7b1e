/** How much an installation takes, before it is made and after, and where all of it lies. Removes nothing. */

import { lstat, readdir } from 'node:fs/promises';
import { homedir } from 'node:os';
import { join } from 'node:path';

import type { Variant } from './installer';

/** Bytes of an engine: to download, and on the disk.
 *
 * Measured on Linux x86-64 with torch 2.13: the wheels' sizes; the environment without a GPU. That with CUDA was not
 * installed: it is what has to be free.
 */
export const engineSizes: Record<Variant, { download: number; disk: number }> = {
  cpu: { download: 300e6, disk: 1_350e6 },
  gpu: { download: 2_900e6, disk: 10_000e6 },
};

/** The model, which the engine fetches when it first starts; what is prepared from it takes 460 MB on the disk. */
const modelSize = { download: 93e6, disk: 560e6 };

export function inWords(bytes: number): string {
  if (bytes < 1e6) {
    return `${Math.ceil(bytes / 1e3)} kB`;
  }
  return bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

/** What a person agrees to, where they may choose between engines. index: where PyTorch comes from, if they set that. */
export function offer(variants: readonly Variant[], index: string): string {
  const sizes = variants.map((variant) => {
    const { download, disk } = engineSizes[variant];
    const [build, limit] = variant === 'gpu' ? ['with CUDA', 'up to '] : ['without a GPU', ''];
    return `${build} about ${inWords(download)} to download and ${limit}${inWords(disk)} on the disk`;
  });
  const from = index === '' ? '' : ` PyTorch is taken from ${index}.`;
  const engine = `Infill needs its engine, which brings PyTorch: ${sizes.join(', or ')}.`;
  return `${engine} The model, ${inWords(modelSize.download)}, is fetched when it starts.${from}`;
}

/** The bytes of all files in a folder, or of a file; 0 where there is nothing. Follows no links. */
export async function bytesOf(path: string): Promise<number> {
  const found = await lstat(path).catch(() => undefined);
  if (!found?.isDirectory()) {
    return found?.isFile() ? found.size : 0;
  }
  const names = await readdir(path).catch(() => []);
  const sizes = await Promise.all(names.map((name) => bytesOf(join(path, name))));
  return sizes.reduce((sum, size) => sum + size, 0);
}

/** A kind of data and the files and folders that hold it. */
export interface Data {
  name: string;
  paths: string[];
}

/** All that the extension, the server and the engine keep, by kind. Others' files in the cache are left alone. */
export async function allData(environments: string, cache = cacheFolder()): Promise<Data[]> {
  const inCache = (await readdir(cache).catch(() => [])).toSorted();
  const logs = inCache.filter((name) => name === 'logs' || /^engine-\w+\.log$/.test(name));
  const at = (...names: string[]): string[] => names.map((name) => join(cache, name));
  return [
    { name: 'Environments', paths: [environments] },
    { name: 'Model', paths: at('models', 'prepared') },
    { name: 'Index', paths: at('index', 'memory') },
    { name: 'Statistics and logs', paths: at('statistics.sqlite', ...logs) },
  ];
}

/** Where the server and the engine keep what can be made again: their `cache_dir()`. */
export function cacheFolder(environment: NodeJS.ProcessEnv = process.env, platform: string = process.platform): string {
  const override = environment['INFILL_CACHE_DIR'];
  if (override) {
    return override;
  }
  if (platform === 'darwin') {
    return join(homedir(), 'Library', 'Caches', 'infill-lsp');
  }
  return join(environment['XDG_CACHE_HOME']?.trim() || join(homedir(), '.cache'), 'infill-lsp');
}
