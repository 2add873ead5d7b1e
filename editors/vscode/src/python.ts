/** Which Python an environment is made with: it is asked what it is, and the first one that fits is taken.
 *
 * Runs nothing itself, and knows no editor.
 */

/** The server's `requires-python`. */
const oldest = [3, 11] as const;

/** By name on the PATH, those first that the server is tested with. */
export const names = ['python3.12', 'python3.11', 'python3', 'python3.13', 'python3.14', 'python'] as const;

/** Prints what `parse` reads. Of a virtual environment it names the Python beneath, which stays when that one goes. */
export const probe = [
  'import json, sys',
  'try:',
  '    import ensurepip, venv',
  '    lacks = ""',
  'except ImportError as error:',
  '    lacks = "ensurepip" if "ensurepip" in str(error) else "venv"',
  'base = getattr(sys, "_base_executable", None) or sys.executable',
  'print(json.dumps({"version": sys.version_info[:2], "program": base, "lacks": lacks}))',
].join('\n');

export interface Python {
  program: string;
  version: readonly [number, number];
  /** The module without which it makes no environment that has pip; empty if it has all. */
  lacks: string;
}

/** Runs a program with arguments, and returns what it printed; rejects where it fails. */
export type Ask = (program: string, given: string[]) => Promise<string>;

/** Why there is no Python, in one line that says what to do. */
export class NoPython extends Error {}

/** The first of `programs` that fits.
 *
 * chosen: whether a person named the only one, by the setting `infill.install.python`.
 * osRelease: the text of /etc/os-release, which tells whose packages there are; empty where there is none.
 */
export async function choose(
  programs: readonly string[],
  { ask, chosen, needsPip, osRelease }: { ask: Ask; chosen: boolean; needsPip: boolean; osRelease: string },
): Promise<Python> {
  let reason = '';
  for (const program of programs) {
    const found = await look(program, ask);
    const fault = typeof found === 'string' ? found : faultOf(found, needsPip, osRelease);
    if (fault === undefined) {
      return found as Python;
    }
    // Of several, the one that only lacks a package is the nearest to a cure.
    reason = reason !== '' && (typeof found === 'string' || isOld(found)) ? reason : fault;
  }
  const cure = `install Python ${oldest.join('.')} or newer, or uv, or name one in the setting infill.install.python`;
  if (chosen) {
    throw new NoPython(`infill.install.python: ${reason}`);
  }
  throw new NoPython(reason === '' ? `there is no Python here: ${cure}` : `no Python fits: ${reason}. Otherwise ${cure}`);
}

async function look(program: string, ask: Ask): Promise<Python | string> {
  try {
    const printed = await ask(program, ['-I', '-c', probe]);
    return JSON.parse(printed.trim().split('\n').at(-1) ?? '') as Python;
  } catch {
    return `${program} is no Python that runs`;
  }
}

function faultOf({ program, version, lacks }: Python, needsPip: boolean, osRelease: string): string | undefined {
  if (isOld({ version })) {
    return `${program} is Python ${version.join('.')}, and ${oldest.join('.')} or newer is needed`;
  }
  if (lacks !== '' && needsPip) {
    return `${program} cannot make environments, because ${lacks} is missing: ${cureFor(version, osRelease)}`;
  }
  return undefined;
}

function isOld({ version: [major, minor] }: Pick<Python, 'version'>): boolean {
  return major < oldest[0] || (major === oldest[0] && minor < oldest[1]);
}

/** What to install where the standard library comes in parts. */
function cureFor(version: Python['version'], osRelease: string): string {
  const families = [...osRelease.matchAll(/^ID(?:_LIKE)?="?([^"\n]*)"?$/gm)].flatMap(([, ids = '']) => ids.split(' '));
  return families.some((id) => id === 'debian' || id === 'ubuntu')
    ? `run sudo apt install python${version.join('.')}-venv`
    : 'install the package of your system that has it, or uv';
}
