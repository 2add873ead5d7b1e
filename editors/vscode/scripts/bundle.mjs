// Puts into bundled/ what the extension sets up its environments with: the wheel of this repository, by its own build
// backend, and the versions that it is tested with.

import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const extension = resolve(dirname(fileURLToPath(import.meta.url)), '..');
const repository = resolve(extension, '..', '..');
const bundled = join(extension, 'bundled');
const own = join(repository, '.venv', 'bin', 'python');
const python = process.env.PYTHON || (existsSync(own) ? own : 'python3');

rmSync(bundled, { recursive: true, force: true });
mkdirSync(bundled);
try {
  const given = ['-m', 'build', '--wheel', '--no-isolation', '--outdir', bundled, repository];
  execFileSync(python, given, { stdio: ['ignore', 'ignore', 'inherit'] });
} catch (error) {
  console.error(`${python} cannot build the wheel (${error.message}): pip install build hatchling, or set PYTHON`);
  process.exit(1);
}
// Triton is the tests' own there; PyTorch's build for CUDA brings the one that it needs.
const versions = readFileSync(join(repository, 'constraints.txt'), 'utf8').replace(/^triton==.*\n/m, '');
writeFileSync(join(bundled, 'constraints.txt'), versions);
