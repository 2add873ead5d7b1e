/** The commands that make an environment, by pip or by uv, and what their output means. Runs none of them. */

import { join } from 'node:path';

/** One program to run. */
export interface Command {
  /** What it does, as in "PyTorch could not be installed". */
  what: string;
  program: string;
  given: string[];
}

/** What installs: the pip that a new environment has, or uv. */
export type Tool = { name: 'pip' } | { name: 'uv'; program: string };

/** What comes with the extension: the wheel of the server, and the versions that it is tested with. */
export interface Bundle {
  wheel: string;
  constraints: string;
}

export type Variant = 'cpu' | 'gpu';

/** Of PyTorch's builds for Linux, PyPI has the one for CUDA, so the one without lies here. */
export const cpuIndex = 'https://download.pytorch.org/whl/cpu';

const isWindows = process.platform === 'win32';

/** A program of the environment in a folder. */
export function programOf(folder: string, name: string): string {
  return isWindows ? join(folder, 'Scripts', `${name}.exe`) : join(folder, 'bin', name);
}

/** A folder with a Python and, for pip, pip. python: what the tool takes as one; for uv also a version. */
export function creating(tool: Tool, python: string, folder: string): Command {
  const what = 'the environment';
  return tool.name === 'pip'
    ? { what, program: python, given: ['-I', '-m', 'venv', folder] }
    : { what, program: tool.program, given: ['venv', '--no-progress', '--python', python, folder] };
}

/** The server alone: no torch. */
export function installingServer(tool: Tool, folder: string, { wheel, constraints }: Bundle): Command {
  return installing(tool, folder, 'the server', [`--constraint=${constraints}`, wheel]);
}

/** torch first and alone, so that nothing else is taken from its index; then what the engine needs beside it. */
export function installingEngine(
  tool: Tool,
  folder: string,
  { wheel, constraints }: Bundle,
  index: string,
  variant: Variant,
): Command[] {
  const known = `--constraint=${constraints}`;
  const torch = ['--no-deps', known, ...placeOf(tool, index || defaultIndex(variant)), 'torch'];
  return [
    installing(tool, folder, 'PyTorch', torch),
    installing(tool, folder, 'the engine', [known, `${wheel}[engine]`]),
  ];
}

function installing(tool: Tool, folder: string, what: string, given: string[]): Command {
  const python = programOf(folder, 'python');
  if (tool.name === 'uv') {
    const quiet = ['pip', 'install', '--python', python, '--no-progress'];
    return { what, program: tool.program, given: [...quiet, '--only-binary=:all:', ...given] };
  }
  const quiet = ['--no-input', '--disable-pip-version-check', '--progress-bar=off', '--retries=2'];
  return { what, program: python, given: ['-I', '-m', 'pip', 'install', ...quiet, '--only-binary=:all:', ...given] };
}

function defaultIndex(variant: Variant): string {
  return variant === 'cpu' && process.platform === 'linux' ? cpuIndex : '';
}

/** An address is that of an index; all else is a folder of wheels. */
function placeOf(tool: Tool, index: string): string[] {
  if (index === '') {
    return [];
  }
  if (/^(https?|file):\/\//.test(index)) {
    return [`${tool.name === 'uv' ? '--default-index' : '--index-url'}=${index}`];
  }
  return ['--no-index', `--find-links=${index}`];
}

/** What the command does now, of one line of its output; undefined where it says nothing for people. */
export function step(line: string): string | undefined {
  const [, doing, named] = /^\s*(Collecting|Downloading|Installing collected packages)[: ]+([\w.-]*)/.exec(line) ?? [];
  if (doing === undefined || named === undefined) {
    return undefined;
  }
  return doing.startsWith('Installing') ? 'installing' : `${doing.toLowerCase()} ${named.replace(/-\d.*/, '')}`;
}

/** Why a command failed, in one line, of what it printed. */
export function complaint(printed: string): string {
  const lost = /(Name or service not known|Temporary failure in name resolution|nodename nor servname|Connection refused|Network is unreachable|No route to host|timed out|ConnectTimeout|dns error|tcp connect error|error sending request|Could not connect|ProxyError)/i.exec(printed);
  if (lost !== null) {
    const [, host] = /(?:https?:\/\/|host=')([\w.-]+(?::\d+)?)/.exec(printed) ?? [];
    return `no connection${host === undefined ? '' : ` to ${host}`} (${lost[1]?.toLowerCase()})`;
  }
  if (/No space left on device|Disk quota exceeded/.test(printed)) {
    return 'the disk is full';
  }
  const [, missing] = /No matching distribution found for ([^\s(]+)/.exec(printed) ?? [];
  if (missing !== undefined) {
    return `${missing} is not to be had there for this Python`;
  }
  const [, conflict] = /The conflict is caused by:\s*\n\s*(\S[^\n]*)/.exec(printed) ?? [];
  if (conflict !== undefined) {
    return `nothing is to be had there that fits: ${conflict}`;
  }
  const lines = printed.split('\n').map((line) => line.trim()).filter(Boolean);
  const error = lines.findLast((line) => /^(error|ERROR)\b/.test(line)) ?? lines.at(-1) ?? 'it said nothing';
  return error.replace(/^(error|ERROR):?\s*/, '');
}
