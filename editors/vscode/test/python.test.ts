import assert from 'node:assert/strict';
import { test } from 'node:test';

import { choose, NoPython, type Ask } from '../src/python';

const debian = 'PRETTY_NAME="Ubuntu 24.04"\nID=ubuntu\nID_LIKE=debian\n';

/** Answers for programs by name: what each says of itself, or nothing where it does not run. */
function answers(known: Record<string, object | string>): Ask {
  return async (program) => {
    const answer = known[program];
    if (answer === undefined) {
      throw new Error('it does not run');
    }
    return typeof answer === 'string' ? answer : `a line of something else\n${JSON.stringify(answer)}\n`;
  };
}

const of = (version: [number, number], lacks = '', program = '/usr/bin/python'): object => ({ version, lacks, program });
const options = { chosen: false, needsPip: true, osRelease: debian };

async function refusal(programs: string[], known: Record<string, object | string>, more: object = {}): Promise<string> {
  const error: unknown = await choose(programs, { ...options, ask: answers(known), ...more }).catch((thrown: unknown) => thrown);
  assert.ok(error instanceof NoPython);
  return error.message;
}

test('the first that fits is taken, and the Python beneath an environment is named', async () => {
  const known = { shim: 'pyenv: python: command not found', old: of([3, 9]), new: of([3, 12], '', '/usr/bin/python3.12') };
  const found = await choose(['missing', 'shim', 'old', 'new'], { ...options, ask: answers(known) });
  assert.equal(found.program, '/usr/bin/python3.12');
});

test('a Python without ensurepip is passed over where another fits', async () => {
  const known = { bare: of([3, 12], 'ensurepip'), whole: of([3, 11], '', '/whole') };
  assert.equal((await choose(['bare', 'whole'], { ...options, ask: answers(known) })).program, '/whole');
});

test('where none fits, the missing package is named, whatever else is wrong with others', async () => {
  const known = { old: of([3, 9]), bare: of([3, 12], 'ensurepip') };
  for (const order of [['old', 'bare', 'missing'], ['bare', 'missing', 'old']]) {
    const said = await refusal(order, known);
    assert.match(said, /ensurepip is missing: run sudo apt install python3\.12-venv/);
  }
});

test('other systems name packages otherwise', async () => {
  const said = await refusal(['bare'], { bare: of([3, 12], 'ensurepip') }, { osRelease: 'ID=fedora\n' });
  assert.doesNotMatch(said, /apt/);
  assert.match(said, /ensurepip is missing/);
});

test('uv needs no ensurepip', async () => {
  const known = { bare: of([3, 12], 'ensurepip', '/bare') };
  assert.equal((await choose(['bare'], { ...options, needsPip: false, ask: answers(known) })).program, '/bare');
});

test('a Python that was named is the only one, and its fault is said', async () => {
  assert.match(await refusal(['/old'], { '/old': of([3, 10], '', '/old') }, { chosen: true }), /install\.python: \/old is Python 3\.10/);
  assert.match(await refusal(['/none'], {}, { chosen: true }), /\/none is no Python that runs/);
});

test('without any Python it is said what to install', async () => {
  assert.match(await refusal([], {}), /install Python 3\.11 or newer, or uv/);
});
