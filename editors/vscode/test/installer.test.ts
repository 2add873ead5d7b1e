import assert from 'node:assert/strict';
import { test } from 'node:test';

import { complaint, cpuIndex, creating, installingEngine, installingServer, step, type Tool } from '../src/installer';

const pip: Tool = { name: 'pip' };
const uv: Tool = { name: 'uv', program: '/bin/uv' };
const bundle = { wheel: '/a b/infill_lsp-1-py3-none-any.whl', constraints: '/a b/constraints.txt' };

test('pip runs isolated, in the new environment, and builds nothing', () => {
  const { program, given } = installingServer(pip, '/e', bundle);
  assert.equal(program, '/e/bin/python');
  assert.deepEqual(given.slice(0, 4), ['-I', '-m', 'pip', 'install']);
  assert.ok(given.includes('--only-binary=:all:'));
  assert.deepEqual(given.slice(-2), ['--constraint=/a b/constraints.txt', bundle.wheel]);
});

test('uv makes and fills an environment without pip', () => {
  assert.deepEqual(creating(uv, '3.12', '/e').given.slice(-3), ['--python', '3.12', '/e']);
  const { program, given } = installingServer(uv, '/e', bundle);
  assert.equal(program, '/bin/uv');
  assert.deepEqual(given.slice(0, 4), ['pip', 'install', '--python', '/e/bin/python']);
});

test('only torch is taken from its index', () => {
  const [torch, rest] = installingEngine(pip, '/e', bundle, '', 'cpu');
  assert.ok(torch?.given.includes(`--index-url=${cpuIndex}`));
  assert.deepEqual(torch?.given.slice(-1), ['torch']);
  assert.ok(torch?.given.includes('--no-deps'));
  assert.doesNotMatch(rest?.given.join(' ') ?? '', /index|find-links/);
  assert.equal(rest?.given.at(-1), `${bundle.wheel}[engine]`);
});

test('for a GPU it comes from where all else comes from', () => {
  const [torch] = installingEngine(pip, '/e', bundle, '', 'gpu');
  assert.doesNotMatch(torch?.given.join(' ') ?? '', /index|find-links/);
});

test('an index that was chosen holds for both, and a folder is one of wheels', () => {
  for (const variant of ['cpu', 'gpu'] as const) {
    const [torch] = installingEngine(pip, '/e', bundle, 'file:///mirror/simple', variant);
    assert.ok(torch?.given.includes('--index-url=file:///mirror/simple'));
  }
  const [torch] = installingEngine(uv, '/e', bundle, '/my wheels', 'cpu');
  assert.ok(torch?.given.includes('--no-index'));
  assert.ok(torch?.given.includes('--find-links=/my wheels'));
});

test('what pip does now', () => {
  assert.equal(step('Collecting torch==2.13.0'), 'collecting torch');
  assert.equal(step('Collecting tree-sitter-c<0.25,>=0.24 (from infill-lsp==0.1.0)'), 'collecting tree-sitter-c');
  assert.equal(step('  Downloading numpy-2.4.6-cp311-cp311-manylinux.whl (16.9 MB)'), 'downloading numpy');
  assert.equal(step('Installing collected packages: mpmath, torch'), 'installing');
  assert.equal(step('Looking in indexes: https://pypi.org/simple'), undefined);
});

test('no network is told from a package that is not there', () => {
  const refused =
    "WARNING: Retrying (Retry(total=1, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3." +
    "connection.HTTPConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused')': " +
    '/simple/torch/\nERROR: Could not find a version that satisfies the requirement torch (from versions: none)\n' +
    'ERROR: No matching distribution found for torch\n';
  assert.equal(complaint(refused), 'no connection (connection refused)');
  assert.equal(complaint('ERROR: No matching distribution found for torch==2.13.0\n'), 'torch==2.13.0 is not to be had there for this Python');
});

test('what does not fit is named', () => {
  const said =
    'The conflict is caused by:\n    infill-lsp 0.1.0 depends on pathspec<2 and >=1.0\n    The user requested (constraint) pathspec==1.1.1\n' +
    'ERROR: ResolutionImpossible: for help visit https://pip.pypa.io\n';
  assert.equal(complaint(said), 'nothing is to be had there that fits: infill-lsp 0.1.0 depends on pathspec<2 and >=1.0');
});

test('uv says which host it did not reach', () => {
  const said =
    'error: Failed to fetch: `https://download.pytorch.org/whl/cpu/torch/`\n  Caused by: client error (Connect)\n' +
    '  Caused by: dns error\n  Caused by: failed to lookup address information: Name or service not known\n';
  assert.equal(complaint(said), 'no connection to download.pytorch.org (dns error)');
});

test('a full disk, and what nobody foresaw', () => {
  assert.equal(complaint("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"), 'the disk is full');
  assert.equal(complaint('one\nERROR: something else went wrong\n\nnotice: a new pip\n'), 'something else went wrong');
  assert.equal(complaint(''), 'it said nothing');
});
