/** What else may stand in the way of suggestions: said once each, with how to choose. */

import * as vscode from 'vscode';

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

export async function tellOfRivals(memory: vscode.Memento): Promise<void> {
  const said = new Set(memory.get<string[]>(saidKey, []));
  const isNew = async (what: string): Promise<boolean> => {
    if (said.has(what)) {
      return false;
    }
    said.add(what);
    await memory.update(saidKey, [...said]);
    return true;
  };
  const inline = vscode.workspace.getConfiguration('editor.inlineSuggest');
  if (inline.get('enabled') === false && (await isNew('inlineSuggest'))) {
    const on = 'Switch on';
    const words = 'Infill draws ghost text, and the setting editor.inlineSuggest.enabled is off.';
    if ((await vscode.window.showInformationMessage(words, on)) === on) {
      await inline.update('enabled', true, vscode.ConfigurationTarget.Global);
    }
  }
  for (const id of others) {
    const other = vscode.extensions.getExtension(id);
    if (other?.isActive && (await isNew(id))) {
      const name = String(other.packageJSON.displayName ?? id);
      const choose = `Look at ${name}`;
      const words = `${name} offers inline suggestions, too, and the editor shows one of them. Switch off the one that you do not want.`;
      const chosen = await vscode.window.showInformationMessage(words, choose, 'Switch Infill off', 'Keep both');
      if (chosen === choose) {
        await vscode.commands.executeCommand('workbench.extensions.search', `@id:${id}`);
      } else if (chosen === 'Switch Infill off') {
        await vscode.commands.executeCommand('infill.toggle');
      }
    }
  }
}
