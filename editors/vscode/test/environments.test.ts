import assert from 'node:assert/strict';
import { existsSync } from 'node:fs';
import { chmod, mkdir, mkdtemp, readdir, readFile, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { test, type TestContext } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';

import { Environments, lock, type Environment } from '../src/environments';
import { Failed, run } from '../src/processes';
import { allData, bytesOf, cacheFolder, inWords, offer } from '../src/sizes';

async function folder(context: TestContext): Promise<string> {
  const made = await mkdtemp(join(tmpdir(), 'infill-'));
  context.after(() => rm(made, { recursive: true, force: true }));
  return made;
}

async function python(environment: Environment): Promise<void> {
  await mkdir(dirname(environment.python), { recursive: true });
  await writeFile(environment.python, '#!/bin/sh\n');
  await chmod(environment.python, 0o755);
}

test('an environment is ready once it is whole, and is kept', async (context) => {
  const { engine } = new Environments(await folder(context), '1');
  assert.ok(!engine.isReady);
  await assert.rejects(engine.make(async () => {
    await python(engine);
    throw new Error('no network');
  }));
  assert.ok(!engine.isReady, 'half of one is none');
  await engine.make(() => python(engine), { variant: 'gpu' });
  assert.ok(engine.isReady);
  await engine.make(() => assert.fail('it is there'));
  await rm(engine.python);
  assert.ok(!engine.isReady, "the system's Python may go");
  assert.equal(engine.variant, 'gpu');
});

test('two windows make one environment', async (context) => {
  const home = await folder(context);
  let made = 0;
  const make = (): Promise<void> => {
    const { server } = new Environments(home, '1');
    return server.make(async () => {
      made += 1;
      await python(server);
    });
  };
  await Promise.all([make(), make(), make()]);
  assert.equal(made, 1);
});

test('who waits for another window can stop, and a window that crashed holds up nobody', async (context) => {
  const home = await folder(context);
  const { server } = new Environments(home, '1');
  await writeFile(`${server.folder}.lock`, String(process.pid));
  await assert.rejects(server.make(() => python(server), { signal: AbortSignal.timeout(50) }), { name: 'AbortError' });
  await writeFile(`${server.folder}.lock`, '4194305'); // More than Linux gives out.
  await server.make(() => python(server));
  assert.ok(server.isReady);
});

test('a lock that nobody touches is taken, though a process has the number of its owner', async (context) => {
  const path = join(await folder(context), 'lock');
  await writeFile(path, `${process.pid} somebody who is gone`);
  const release = await lock(path, AbortSignal.timeout(10_000), 300);
  assert.match(await readFile(path, 'utf8'), new RegExp(`^${process.pid} `));
  await release();
  assert.ok(!existsSync(path));
});

test('of many who find the lock of one that is gone, one has it at a time', async (context) => {
  const path = join(await folder(context), 'lock');
  await writeFile(path, '4194305 gone'); // More than Linux gives out.
  let [holders, most] = [0, 0];
  await Promise.all(
    Array.from({ length: 12 }, async () => {
      const release = await lock(path, AbortSignal.timeout(30_000));
      most = Math.max(most, ++holders);
      await sleep(20);
      holders--;
      await release();
    }),
  );
  assert.equal(most, 1);
  assert.deepEqual(await readdir(join(path, '..')), []);
});

test('an upgrade finds what other versions made, and what was agreed to then', async (context) => {
  const home = await folder(context);
  const old = new Environments(home, '1');
  await old.engine.make(() => python(old.engine), { variant: 'cpu' });
  await old.server.make(() => python(old.server));
  const now = new Environments(home, '2');
  await now.server.make(() => python(now.server));
  assert.deepEqual((await now.others()).map(({ kind }) => kind).toSorted(), ['engine', 'server']);
  assert.equal(await now.agreed(), 'cpu');
  for (const one of await now.others()) {
    await one.remove();
  }
  assert.ok(now.server.isReady);
  assert.ok(!existsSync(old.engine.folder));
  assert.equal(await now.agreed(), undefined);
});

test('"not now" is remembered till it is taken back', async (context) => {
  const home = await folder(context);
  await new Environments(home, '1').putOff(true);
  const later = new Environments(home, '2');
  assert.ok(later.isPutOff);
  await later.putOff(false);
  await later.putOff(false);
  assert.ok(!later.isPutOff);
});

test('a program is run to its end, away from what would mislead it', async (context) => {
  const home = await folder(context);
  process.env['PYTHONPATH'] = '/elsewhere';
  context.after(() => delete process.env['PYTHONPATH']);
  assert.equal(await run('/bin/sh', ['-c', 'echo "$PYTHONPATH$X"; pwd'], { folder: home, environment: { X: 'x' } }), `x\n${home}`);
  await assert.rejects(run('/bin/sh', ['-c', 'echo why >&2; exit 3'], { folder: home }), (error) => {
    assert.ok(error instanceof Failed);
    assert.equal(error.printed, 'why');
    return true;
  });
  await assert.rejects(run('/none', [], { folder: home }), Failed);
});

test('what is stopped ends with all that it started', async (context) => {
  const home = await folder(context);
  const stopping = run('/bin/sh', ['-c', 'sleep 600 & wait'], { folder: home, signal: AbortSignal.timeout(50) });
  await assert.rejects(stopping, { message: 'it was stopped' }); // Not before the child has closed its end of the pipe.
});

test('all data is found and nothing else', async (context) => {
  const cache = await folder(context);
  const files = ['models/m.gguf', 'prepared/p', 'index/i', 'memory/w/1', 'logs/l', 'engine-ab12.log', 'statistics.sqlite', 'corpus/mine'];
  for (const name of files) {
    await mkdir(dirname(join(cache, name)), { recursive: true });
    await writeFile(join(cache, name), 'x'.repeat(10));
  }
  await symlink('i', join(cache, 'index', 'again'));
  await symlink('w', join(cache, 'memory', 'again'));
  const data = await allData(join(cache, 'none'), cache);
  const sizes = await Promise.all(data.map(async ({ paths }) => (await Promise.all(paths.map(bytesOf))).reduce((a, b) => a + b, 0)));
  assert.deepEqual(sizes, [0, 20, 20, 30]);
  assert.ok(!data.some(({ paths }) => paths.includes(join(cache, 'corpus'))));
});

test('the cache is where the server has it', () => {
  assert.equal(cacheFolder({ INFILL_CACHE_DIR: '/c' }), '/c');
  assert.equal(cacheFolder({ XDG_CACHE_HOME: '/x' }, 'linux'), '/x/infill-lsp');
  assert.match(cacheFolder({}, 'linux'), /\/\.cache\/infill-lsp$/);
  assert.match(cacheFolder({}, 'darwin'), /\/Library\/Caches\/infill-lsp$/);
});

test('sizes in words', () => {
  assert.deepEqual([0, 1, 12_345_678, 1_290e6].map(inWords), ['0 kB', '1 kB', '12 MB', '1.3 GB']);
  assert.match(offer(['cpu'], ''), /without a GPU about 300 MB to download/);
  assert.match(offer(['gpu', 'cpu'], '/wheels'), /2\.9 GB to download.*, or without a GPU about 300 MB.*taken from \/wheels/);
});
