/** Fills what a person points at: a selection, holes, or all cursors. Shows first what would change, where that is much. */

import * as vscode from 'vscode';
import { LSPErrorCodes, ResponseError, WorkDoneProgress, type LanguageClient } from 'vscode-languageclient/node';

import { endOf } from './anchors';
import { compares, comparisons, type Previews } from './preview';

interface Answer {
  version: number;
  edits: { range: { start: Place; end: Place }; newText: string; sure: number }[];
}

interface Place {
  line: number;
  character: number;
}

/** The argument of the server's command `infill.server.fill`, which its code actions carry. */
export interface Order {
  uri: string;
  /** The document's, which the ranges are of. */
  version: number;
  ranges: { start: Place; end: Place }[];
  mode: 'selection' | 'holes';
}

interface Proposal {
  document: vscode.TextDocument;
  version: number;
  edit: vscode.TextEdit;
  right: vscode.Uri;
}

export class Fill implements vscode.Disposable {
  private proposal: Proposal | undefined;
  private count = 0;
  /** What nobody sees any more is not to be accepted. */
  private readonly closing = vscode.window.tabGroups.onDidChangeTabs(({ closed }) => {
    const right = this.proposal?.right;
    if (right !== undefined && closed.some((tab) => compares(tab, right)) && comparisons(right).length === 0) {
      void this.close();
    }
  });

  constructor(
    private readonly client: () => LanguageClient | undefined,
    private readonly previews: Previews,
  ) {}

  /** Writes the selection anew, shown as a comparison first. */
  async selection(): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    if (editor !== undefined) {
      const { document, selections } = editor;
      await this.offer(document, await this.ask(document, [...selections], 'selection'));
    }
  }

  /** Fills the holes in the selection; without one, those of the document. */
  async holes(): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    if (editor !== undefined) {
      const { document, selections } = editor;
      await this.offer(document, await this.ask(document, selections.filter((one) => !one.isEmpty), 'holes'));
    }
  }

  /** Fills each cursor, in one step that one undo takes back. */
  async cursors(): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    if (editor === undefined) {
      return;
    }
    const { document, selections } = editor;
    const edits = await this.ask(document, [...selections], 'selection');
    // Another tab may have been chosen meanwhile: only an editor that is seen can be edited.
    const seen = vscode.window.visibleTextEditors.find((one) => one === editor) ?? (edits.length > 0 ? await shown(document) : undefined);
    const isWritten = await seen?.edit((builder) => {
      for (const { range, newText } of edits) {
        if (range.isEmpty) {
          builder.insert(range.start, newText);
        } else {
          builder.replace(range, newText);
        }
      }
    });
    if (isWritten !== true && edits.length > 0) {
      sayThatItChanged();
    }
  }

  /** What a code action of the server asks for. */
  async ordered({ uri, version, ranges, mode }: Order): Promise<void> {
    const client = this.client();
    if (client !== undefined) {
      const document = await vscode.workspace.openTextDocument(client.protocol2CodeConverter.asUri(uri));
      await this.offer(document, await this.ask(document, ranges.map(asRange), mode, version));
    }
  }

  async accept(): Promise<void> {
    if (this.proposal === undefined) {
      return;
    }
    const { document, version, edit } = this.proposal;
    const isAsItWas = document.version === version;
    if (isAsItWas) {
      const all = new vscode.WorkspaceEdit();
      all.set(document.uri, [edit]);
      if (!(await vscode.workspace.applyEdit(all))) {
        void vscode.window.showWarningMessage('Infill: the editor could not write it. The comparison stays open.');
        return;
      }
    } else {
      sayThatItChanged();
    }
    await this.close();
    const editor = await vscode.window.showTextDocument(document);
    if (isAsItWas) {
      const { line, character } = endOf(edit.range.start, edit.newText);
      const end = new vscode.Position(line, character); // What was selected is gone: the editor would keep as much of the new text selected.
      editor.selection = new vscode.Selection(end, end);
      editor.revealRange(editor.selection);
    }
  }

  async reject(): Promise<void> {
    await this.close();
  }

  dispose(): void {
    this.closing.dispose();
  }

  private async close(): Promise<void> {
    const proposal = this.proposal;
    this.proposal = undefined;
    await vscode.commands.executeCommand('setContext', 'infill.hasProposal', false);
    if (proposal !== undefined) {
      await vscode.window.tabGroups.close(comparisons(proposal.right));
    }
  }

  /** The edits, at the document's version of now; empty where there are none, which has been said then. */
  private async ask(
    document: vscode.TextDocument,
    ranges: vscode.Range[],
    mode: Order['mode'],
    version = document.version,
  ): Promise<vscode.TextEdit[]> {
    const client = this.client();
    if (!client?.isRunning()) {
      void vscode.window.showWarningMessage('Infill: the server is not running.');
      return [];
    }
    const textDocument = { uri: client.code2ProtocolConverter.asUri(document.uri), version };
    const places = ranges.map((range) => client.code2ProtocolConverter.asRange(range));
    const options = { location: vscode.ProgressLocation.Notification, title: 'Infill: fill', cancellable: true };
    try {
      const answer = await vscode.window.withProgress(options, async (progress, token) => {
        const workDoneToken = `infill-fill-${++this.count}`;
        let told = 0;
        const bar = client.onProgress(WorkDoneProgress.type, workDoneToken, (value) => {
          if (value.kind !== 'end') {
            const percentage = value.percentage ?? told;
            progress.report({ message: value.message ?? '', increment: percentage - told });
            told = percentage;
          }
        });
        try {
          const params = { textDocument, ranges: places, mode, workDoneToken };
          return await client.sendRequest<Answer>('infill/fill', params, token);
        } finally {
          bar.dispose();
        }
      });
      if (answer.edits.length > 0 && answer.version !== document.version) {
        throw new ResponseError(LSPErrorCodes.ContentModified, 'the document has changed meanwhile: ask again');
      }
      return answer.edits.map(({ range, newText }) => vscode.TextEdit.replace(asRange(range), newText));
    } catch (error) {
      const cancelled = error instanceof ResponseError && error.code === LSPErrorCodes.RequestCancelled;
      if (!cancelled) {
        void vscode.window.showWarningMessage(`Infill: ${error instanceof Error ? error.message : String(error)}`);
      }
      return [];
    }
  }

  /** One place as a comparison with buttons; several as edits of which each can be left out. */
  private async offer(document: vscode.TextDocument, edits: vscode.TextEdit[]): Promise<void> {
    if (edits.length > 1) {
      const edit = new vscode.WorkspaceEdit();
      edits.forEach(({ range, newText }, index) => {
        const label = `Hole ${index + 1} of ${edits.length}, line ${range.start.line + 1}`;
        edit.replace(document.uri, range, newText, { needsConfirmation: true, label });
      });
      await vscode.workspace.applyEdit(edit, { isRefactoring: true });
    } else if (edits[0] !== undefined) {
      const [edit] = edits;
      await this.close(); // The one before: its buttons would accept this one.
      const right = this.previews.add(document.uri, applied(document, edit));
      this.proposal = { document, version: document.version, edit, right };
      await vscode.commands.executeCommand('setContext', 'infill.hasProposal', true);
      const name = document.uri.path.split('/').pop() ?? '';
      await this.previews.compare(document.uri, right, `${name}: what Infill would write`);
    }
  }
}

/** Its editor; undefined where it can be shown no more. */
async function shown(document: vscode.TextDocument): Promise<vscode.TextEditor | undefined> {
  try {
    return await vscode.window.showTextDocument(document);
  } catch {
    return undefined;
  }
}

function sayThatItChanged(): void {
  void vscode.window.showWarningMessage('Infill: the document has changed since, and nothing was written. Ask again.');
}

/** The document's text with the edit in it. */
function applied(document: vscode.TextDocument, { range, newText }: vscode.TextEdit): string {
  const text = document.getText();
  return text.slice(0, document.offsetAt(range.start)) + newText + text.slice(document.offsetAt(range.end));
}

function asRange({ start, end }: { start: Place; end: Place }): vscode.Range {
  return new vscode.Range(start.line, start.character, end.line, end.character);
}
