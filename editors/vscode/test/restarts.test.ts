import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Restarts } from '../src/restarts';

test('four restarts within three minutes, each later than the one before, and no fifth', () => {
  const restarts = new Restarts();
  const delays = [0, 1_000, 5_000, 30_000, 60_000].map((now) => restarts.next(now));
  assert.deepEqual(delays, [250, 1_000, 4_000, 16_000, undefined]);
});

test('what is longer ago than three minutes does not count', () => {
  const restarts = new Restarts();
  [0, 1, 2, 3].forEach((now) => restarts.next(now));
  assert.equal(restarts.next(179_999), undefined);
  assert.equal(restarts.next(180_001), 4_000);
});

test('a start by hand begins anew', () => {
  const restarts = new Restarts();
  [0, 1, 2, 3].forEach((now) => restarts.next(now));
  restarts.forget();
  assert.equal(restarts.next(4), 250);
});
