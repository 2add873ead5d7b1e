/** What else may stand in the way of suggestions: said once each, with how to choose. */

import * as vscode from 'vscode';

import { switchEverywhere } from './switches';

const others = [
  'github.copilot',
  'github.copilot-chat',
  'codeium.codeium',
  'tabnine.tabnine-vscode',
  'supermaven.supermaven',
  'continue.continue',
  'ggml-org.llama-vscode',
  'tabbyml.vscode-tabby',
  'amazonwebservices.amazon-q-vscode',
  'sourcegraph.cody-ai',
];

const saidKey = 'infill.said';

export class Rivals implements vscode.Disposable {
  private readonly said: Set<string>;
  private readonly registered: vscode.Disposable[];

  constructor(private readonly memory: vscode.Memento) {
    this.said = new Set(memory.get<string[]>(saidKey, []));
    this.registered = [
      // Other extensions start when they like, and nothing tells of it: one that is active is met at the next file.
      vscode.window.onDidChangeActiveTextEditor(() => this.look()),
      vscode.workspace.onDidChangeConfiguration((event) => event.affectsConfiguration('editor.inlineSuggest') && this.look()),
    ];
  }

  /** Says what is new. */
  look(): void {
    const inline = vscode.workspace.getConfiguration('editor.inlineSuggest');
    if (inline.get('enabled') === false && this.isNew('inlineSuggest')) {
      void sayThatNothingIsDrawn(inline);
    }
    for (const id of others) {
      const other = vscode.extensions.getExtension(id);
      if (other?.isActive && this.isNew(id)) {
        void sayThatThereIsAnother(other);
      }
    }
  }

  dispose(): void {
    this.registered.forEach((one) => one.dispose());
  }

  private isNew(what: string): boolean {
    const isNew = !this.said.has(what);
    if (isNew) {
      this.said.add(what);
      void this.memory.update(saidKey, [...this.said]);
    }
    return isNew;
  }
}

async function sayThatNothingIsDrawn(inline: vscode.WorkspaceConfiguration): Promise<void> {
  const on = 'Switch on';
  const words = 'Infill draws ghost text, and the setting editor.inlineSuggest.enabled is off.';
  if ((await vscode.window.showInformationMessage(words, on)) === on) {
    await inline.update('enabled', true, vscode.ConfigurationTarget.Global);
  }
}

async function sayThatThereIsAnother(other: vscode.Extension<unknown>): Promise<void> {
  const name = String(other.packageJSON.displayName ?? other.id);
  const [look, off] = [`Look at ${name}`, 'Switch Infill off'];
  const words = `${name} offers inline suggestions, too, and the editor shows one of them. Switch off the one that you do not want.`;
  const chosen = await vscode.window.showInformationMessage(words, look, off, 'Keep both');
  if (chosen === look) {
    await vscode.commands.executeCommand('workbench.extensions.search', `@id:${other.id}`);
  } else if (chosen === off) {
    await switchEverywhere(false);
  }
}
