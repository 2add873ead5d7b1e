/** What is offered at the cursor, between the language client that asks for it and the editor that draws it.
 *
 * Keeps back what is not to be offered here, tells the server what was drawn and taken, and remembers the last one. The
 * editor's stable interface tells neither what it drew nor what was accepted in part: drawn is what was answered for a
 * place at which the cursor still is; what was taken in part is read from the document.
 */

import * as vscode from 'vscode';
import type { LanguageClient, Middleware } from 'vscode-languageclient/node';

import { anchorAt, endOf, findAnchor, takenLength } from './anchors';
import type { Previews } from './preview';
import type { Switches } from './switches';

interface Shown {
  id: string;
  text: string;
  uri: vscode.Uri;
  /** Where the text begins, and what it takes the place of from there. */
  start: vscode.Position;
  replaced: string;
  /** The document as it was, and the cursor's place in it. */
  document: string;
  cursor: vscode.Position;
}

/** `infill/refresh`: there is a better answer for a place now. */
export interface Refresh {
  textDocument: { uri: string };
  version: number;
  position: { line: number; character: number };
}

type Next = Parameters<NonNullable<Middleware['provideInlineCompletionItems']>>[4];
type Answer = vscode.InlineCompletionItem[] | vscode.InlineCompletionList | null | undefined;

export class Suggestions {
  /** What was answered last, the one first that is drawn first: a person may go on to another. */
  private shown: Shown[] = [];
  private last: Shown | undefined;
  /** What is to be the answer where it is asked for next, if that is here. */
  private again: { last: Shown; cursor: vscode.Position } | undefined;
  /** The next question comes from a refresh, and not by hand. */
  private refreshing = false;

  constructor(
    private readonly client: () => LanguageClient | undefined,
    private readonly switches: Switches,
    private readonly previews: Previews,
  ) {}

  async provide(
    document: vscode.TextDocument,
    position: vscode.Position,
    context: vscode.InlineCompletionContext,
    token: vscode.CancellationToken,
    next: Next,
  ): Promise<Answer> {
    const again = this.again;
    this.again = undefined;
    if (again?.cursor.isEqual(position) && document.uri.toString() === again.last.uri.toString()) {
      return this.repeat(again.last, position);
    }
    const editor = vscode.window.activeTextEditor;
    if (this.switches.off(editor?.document === document ? editor : undefined) !== undefined) {
      return [];
    }
    const automatic = vscode.InlineCompletionTriggerKind.Automatic;
    const asked = this.refreshing ? { ...context, triggerKind: automatic } : context;
    this.refreshing = false;
    const answer = await next(document, position, asked, token);
    if (!token.isCancellationRequested) {
      this.note(document, position, answer);
    }
    return answer;
  }

  /** By hand, whatever `infill.trigger` says. */
  async trigger(): Promise<void> {
    await vscode.commands.executeCommand('editor.action.inlineSuggest.trigger');
  }

  async refresh({ textDocument, version, position }: Refresh): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const isHere =
      editor !== undefined &&
      this.client()?.code2ProtocolConverter.asUri(editor.document.uri) === textDocument.uri &&
      editor.document.version === version &&
      editor.selection.isEmpty &&
      editor.selection.active.isEqual(new vscode.Position(position.line, position.character));
    if (isHere && this.switches.off(editor) === undefined) {
      this.refreshing = true;
      await vscode.commands.executeCommand('editor.action.inlineSuggest.trigger');
    }
  }

  /** A suggestion was taken whole, by the editor. */
  accepted(id: unknown): void {
    const taken = this.shown.find((one) => one.id === id);
    const editor = vscode.window.activeTextEditor;
    if (taken !== undefined && editor?.document.uri.toString() === taken.uri.toString()) {
      putBehind(editor, taken.start, taken.text);
    }
  }

  /** Accepts a part by the editor's own command, and tells how much is taken by now. */
  async acceptPart(part: 'Word' | 'Line'): Promise<void> {
    const before = this.shown;
    const asked = vscode.window.activeTextEditor;
    const [from, length] = [asked?.selection.active, asked?.document.getText().length];
    await vscode.commands.executeCommand(`editor.action.inlineSuggest.acceptNext${part}`);
    const editor = vscode.window.activeTextEditor;
    if (editor !== undefined && editor === asked && from !== undefined && length !== undefined) {
      const { document } = editor;
      const end = document.offsetAt(from) + document.getText().length - length;
      putBehind(editor, from, document.getText(new vscode.Range(from, document.positionAt(end))));
    }
    for (const { id, text, uri, start, replaced } of before) {
      if (editor?.document.uri.toString() !== uri.toString()) {
        continue;
      }
      const length = takenLength(text, editor.document.getText(new vscode.Range(start, editor.selection.active)));
      if (length > replaced.length) {
        await this.tell('infill/partiallyAccepted', { id, length });
        return;
      }
    }
  }

  /** Shows the last suggestion where it was offered, if that place is there still; otherwise as a comparison. */
  async showLast(): Promise<void> {
    const last = this.last;
    if (last === undefined) {
      void vscode.window.showInformationMessage('Infill: nothing has been suggested yet.');
      return;
    }
    const document = await openedOrUndefined(last.uri);
    if (document === undefined) {
      void vscode.window.showInformationMessage('Infill: the file of the last suggestion is gone.');
      return;
    }
    const { line: row, character } = last.cursor;
    const line = findAnchor(anchorAt(linesOf(last.document), row, character), linesOf(document.getText()));
    if (line === undefined) {
      const name = last.uri.path.split('/').pop() ?? '';
      await this.previews.compare(
        this.previews.add(last.uri, last.document),
        this.previews.add(last.uri, insert(last.document, last)),
        `The last suggestion in ${name}, as the text was`,
      );
      return;
    }
    const editor = await vscode.window.showTextDocument(document);
    const cursor = new vscode.Position(line, character);
    editor.selection = new vscode.Selection(cursor, cursor);
    editor.revealRange(editor.selection, vscode.TextEditorRevealType.InCenterIfOutsideViewport);
    this.again = { last, cursor };
    await vscode.commands.executeCommand('editor.action.inlineSuggest.trigger');
  }

  private repeat(last: Shown, position: vscode.Position): vscode.InlineCompletionItem[] {
    const start = position.translate(0, last.start.character - last.cursor.character);
    const range = new vscode.Range(start, start.translate(0, last.replaced.length));
    const accepted = { title: 'accepted', command: 'infill.server.accepted', arguments: [last.id] };
    this.shown = [{ ...last, start }];
    return [new vscode.InlineCompletionItem(last.text, range, accepted)];
  }

  private note(document: vscode.TextDocument, position: vscode.Position, answer: Answer): void {
    const items = Array.isArray(answer) ? answer : (answer?.items ?? []);
    const before = document.getText();
    this.shown = items.flatMap(({ command, insertText, range = new vscode.Range(position, position) }) => {
      const id: unknown = command?.arguments?.[0];
      const place = { uri: document.uri, start: range.start, replaced: document.getText(range), document: before, cursor: position };
      return typeof id === 'string' && typeof insertText === 'string' ? [{ id, text: insertText, ...place }] : [];
    });
    const [first] = this.shown;
    if (first === undefined) {
      return;
    }
    this.last = first;
    const { version } = document;
    // After the editor had its turn to draw.
    setTimeout(() => {
      const editor = vscode.window.activeTextEditor;
      if (editor?.document === document && document.version === version && editor.selection.active.isEqual(position)) {
        void this.tell('infill/offered', { id: first.id });
      }
    });
  }

  private async tell(method: string, what: object): Promise<void> {
    const client = this.client();
    if (client?.isRunning()) {
      await client.sendNotification(method, what);
    }
  }
}

/** The editor counts a character beyond the basic plane as one where it puts the cursor behind a suggestion, and as two
 * elsewhere: the cursor would stand before the end. */
function putBehind(editor: vscode.TextEditor, start: vscode.Position, text: string): void {
  const { line, character } = endOf(start, text);
  const [end, { active, isEmpty }] = [new vscode.Position(line, character), editor.selection];
  if (/[\u{10000}-\u{10ffff}]/u.test(text) && isEmpty && active.line === line && active.isBefore(end)) {
    editor.selection = new vscode.Selection(end, end);
  }
}

async function openedOrUndefined(uri: vscode.Uri): Promise<vscode.TextDocument | undefined> {
  try {
    return await vscode.workspace.openTextDocument(uri);
  } catch {
    return undefined;
  }
}

function linesOf(text: string): string[] {
  return text.split(/\r\n|\n|\r/);
}

/** The document as it was when something was suggested, with that in it. */
function insert(text: string, { start, replaced, text: suggested }: Shown): string {
  const offset = text.split('\n', start.line).reduce((sum, line) => sum + line.length + 1, 0) + start.character;
  return text.slice(0, offset) + suggested + text.slice(offset + replaced.length);
}
