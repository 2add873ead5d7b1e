import assert from 'node:assert/strict';
import { test } from 'node:test';

import { next, variants, type Known } from '../src/stage';

const fresh: Known = { serverPath: '', engineElsewhere: false, serverIsReady: false, engineIsReady: false, agreed: undefined, putOff: false };
const served = { ...fresh, serverIsReady: true };

test('from nothing to an engine', () => {
  assert.equal(next(fresh), 'server');
  assert.equal(next(served), 'ask');
  assert.equal(next({ ...served, agreed: 'cpu' }), 'engine');
  assert.equal(next({ ...served, agreed: 'cpu', engineIsReady: true }), 'done');
});

test('"not now" holds till a person asks for it', () => {
  assert.equal(next({ ...served, putOff: true }), 'wait');
});

test('an upgrade makes both anew without another question', () => {
  assert.equal(next({ ...fresh, agreed: 'gpu', putOff: true }), 'server');
  assert.equal(next({ ...served, agreed: 'gpu', putOff: true }), 'engine');
});

test('what a person has already is not made', () => {
  assert.equal(next({ ...fresh, serverPath: '/mine' }), 'done');
  assert.equal(next({ ...fresh, engineElsewhere: true }), 'server');
  assert.equal(next({ ...served, engineElsewhere: true }), 'done');
});

test('a GPU is offered where there is one, and alone where it was chosen', () => {
  assert.deepEqual(variants('auto', false), ['cpu']);
  assert.deepEqual(variants('auto', true), ['gpu', 'cpu']);
  assert.deepEqual(variants('cpu', true), ['cpu']);
  assert.deepEqual(variants('cuda:1', false), ['gpu']);
});
