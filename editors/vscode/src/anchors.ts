/** Where a suggestion was offered, whether that place is there still, how much of it is written and where it ends. Knows no
 * editor. */

/** Lines above the cursor by which its place is known again. */
const above = 3;

/** A place between two characters, by what stands around it. */
export interface Anchor {
  line: number;
  /** The lines above, at most three, the nearest last. */
  before: string[];
  head: string;
  tail: string;
}

export function anchorAt(lines: readonly string[], line: number, character: number): Anchor {
  const text = lines[line] ?? '';
  return {
    line,
    before: lines.slice(Math.max(0, line - above), line),
    head: text.slice(0, character),
    tail: text.slice(character),
  };
}

/** The line where the anchor's place is now, the nearest one if there are several; undefined where it is gone. */
export function findAnchor(anchor: Anchor, lines: readonly string[]): number | undefined {
  const wanted = [...anchor.before, anchor.head + anchor.tail];
  const matches = (line: number): boolean => {
    const first = line - anchor.before.length;
    return first >= 0 && wanted.every((text, index) => lines[first + index] === text);
  };
  let found: number | undefined;
  for (let line = 0; line < lines.length; line++) {
    if (matches(line) && (found === undefined || Math.abs(line - anchor.line) < Math.abs(found - anchor.line))) {
      found = line;
    }
  }
  return found;
}

/** UTF-16 code units of `suggestion` that stand in the document already, where `written` is what stands from its start. */
export function takenLength(suggestion: string, written: string): number {
  const [ours, theirs] = [suggestion, written].map((text) => text.replaceAll('\r\n', '\n')) as [string, string];
  if (!ours.startsWith(theirs)) {
    return 0;
  }
  // Back into the suggestion's own line ends, which its length is counted in.
  const ends = suggestion.includes('\r\n') ? theirs.split('\n').length - 1 : 0;
  return theirs.length + ends;
}

/** Where a text ends that begins at `start`, in UTF-16 code units. */
export function endOf(start: { line: number; character: number }, text: string): { line: number; character: number } {
  const lines = text.split(/\r\n|\n/);
  const last = lines.at(-1)?.length ?? 0;
  return lines.length === 1 ? { line: start.line, character: start.character + last } : { line: start.line + lines.length - 1, character: last };
}
