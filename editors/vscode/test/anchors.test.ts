import assert from 'node:assert/strict';
import { test } from 'node:test';

import { anchorAt, endOf, findAnchor, takenLength } from '../src/anchors';

const lines = ['import os', '', 'def f(a):', '    return ', '', 'def g(a):', '    return '];

test('a place is found again where it was', () => {
  assert.equal(findAnchor(anchorAt(lines, 3, 11), lines), 3);
});

test('a place that moved is found where it is now', () => {
  const anchor = anchorAt(lines, 6, 11);
  assert.equal(findAnchor(anchor, ['# new', ...lines]), 7);
});

test('a place whose line, or the lines above, changed is gone', () => {
  const anchor = anchorAt(lines, 3, 11);
  assert.equal(findAnchor(anchor, lines.with(3, '    return a')), undefined);
  assert.equal(findAnchor(anchor, lines.with(2, 'def h(a):')), undefined);
});

test('of several places the nearest is meant', () => {
  const same = ['a', 'b', 'c', 'x', 'a', 'b', 'c', 'x'];
  assert.equal(findAnchor(anchorAt(same, 7, 1), same), 7);
});

test('the first line of a document has nothing above', () => {
  assert.equal(findAnchor(anchorAt(['x = '], 0, 4), ['x = ']), 0);
});

test('what is written of a suggestion is counted in its own units', () => {
  assert.equal(takenLength('width * height', 'width'), 5);
  assert.equal(takenLength('🙂 ok', '🙂'), 2);
  assert.equal(takenLength('a\r\nb\r\nc', 'a\r\nb'), 4);
  assert.equal(takenLength('a\r\nb\r\nc', 'a\nb'), 4);
  assert.equal(takenLength('a\nb', 'a\r\nb'), 3);
});

test('what is something else takes nothing', () => {
  assert.equal(takenLength('width', 'height'), 0);
});

test('a text ends where its last line does, in UTF-16 code units', () => {
  assert.deepEqual(endOf({ line: 2, character: 4 }, "'🎂' + who"), { line: 2, character: 14 });
  assert.deepEqual(endOf({ line: 2, character: 4 }, 'a\r\n🎂\nb🎂'), { line: 4, character: 3 });
});
