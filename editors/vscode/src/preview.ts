/** Text that is nowhere on disk, shown beside a document. */

import * as vscode from 'vscode';

export const previewScheme = 'infill-preview';

export class Previews implements vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly texts = new Map<string, string>();
  private count = 0;
  private readonly registered = [
    vscode.workspace.registerTextDocumentContentProvider(previewScheme, this),
    vscode.workspace.onDidCloseTextDocument(({ uri }) => this.texts.delete(uri.toString())),
  ];

  provideTextDocumentContent(uri: vscode.Uri): string {
    return this.texts.get(uri.toString()) ?? '';
  }

  /** A document with this text, highlighted as `like` is. */
  add(like: vscode.Uri, text: string): vscode.Uri {
    const uri = vscode.Uri.from({ scheme: previewScheme, path: like.path, query: String(++this.count) });
    this.texts.set(uri.toString(), text);
    return uri;
  }

  async compare(left: vscode.Uri, right: vscode.Uri, title: string): Promise<void> {
    await vscode.commands.executeCommand('vscode.diff', left, right, title, { preview: true });
  }

  dispose(): void {
    this.registered.forEach((one) => one.dispose());
  }
}

/** Whether a tab is the comparison that shows `right`. */
export function compares({ input }: vscode.Tab, right: vscode.Uri): boolean {
  return input instanceof vscode.TabInputTextDiff && input.modified.toString() === right.toString();
}

/** The tabs that show `right` in a comparison. */
export function comparisons(right: vscode.Uri): vscode.Tab[] {
  return vscode.window.tabGroups.all.flatMap(({ tabs }) => tabs.filter((tab) => compares(tab, right)));
}
