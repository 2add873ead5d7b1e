/** The menu of the status bar's item: what can be switched, asked and looked at. Does nothing but offer it. */

import * as vscode from 'vscode';

import { isLanguageOff, set, type Switches } from './switches';

type Entry = vscode.QuickPickItem & { command?: string; arguments?: unknown[] };

const levels = ['quiet', 'balanced', 'eager'] as const;

/** incomplete: whether something is not set up yet. */
export async function showMenu(state: string, switches: Switches, incomplete: boolean): Promise<void> {
  const entries = [...(incomplete ? setUp : []), ...switching(switches), ...asking(), ...caring()];
  const chosen = await vscode.window.showQuickPick(entries, { title: 'Infill', placeHolder: state });
  if (chosen?.command !== undefined) {
    await vscode.commands.executeCommand(chosen.command, ...(chosen.arguments ?? []));
  }
}

const setUp: Entry[] = [
  { label: '$(tools) Set up what is missing', command: 'infill.setUp' },
  { label: '', kind: vscode.QuickPickItemKind.Separator },
];

function switching(switches: Switches): Entry[] {
  const document = vscode.window.activeTextEditor?.document;
  const configuration = vscode.workspace.getConfiguration('infill', document?.uri);
  const on = configuration.get('enabled') !== false;
  const entries: Entry[] = [
    { label: on ? '$(circle-slash) Switch off' : '$(check) Switch on', description: on ? 'the engine is let go' : '', command: 'infill.toggle' },
  ];
  if (on && document !== undefined) {
    const language = document.languageId;
    const [languageIsOff, fileIsOff] = [isLanguageOff(language), switches.isOff(document.uri)];
    entries.push(
      { label: `${icon(languageIsOff)} Switch ${languageIsOff ? 'on' : 'off'} for ${language}`, command: 'infill.toggleLanguage' },
      { label: `${icon(fileIsOff)} Switch ${fileIsOff ? 'on' : 'off'} for this file`, command: 'infill.toggleFile' },
    );
  }
  if (on && switches.snoozed !== undefined) {
    entries.push({ label: '$(bell) Wake up', command: 'infill.wake' });
  } else if (on) {
    const snoozes = [5, 15, 60].map((minutes) => ({
      label: `$(bell-slash) Snooze for ${minutes} minutes`,
      command: 'infill.snooze',
      arguments: [minutes],
    }));
    entries.push(...snoozes);
  }
  const level = configuration.get<string>('aggressiveness');
  entries.push({ label: '$(settings) How sure a suggestion must be', description: level ?? '', command: 'infill.chooseAggressiveness' });
  return [...entries, { label: '', kind: vscode.QuickPickItemKind.Separator }];
}

function asking(): Entry[] {
  return [
    { label: '$(question) Why is nothing offered here?', command: 'infill.why' },
    { label: '$(history) Show the last suggestion', command: 'infill.showLast' },
    { label: '$(eye) Watch the model write', command: 'infill.denoise' },
    { label: '$(graph) Statistics', command: 'infill.statistics' },
    { label: '', kind: vscode.QuickPickItemKind.Separator },
  ];
}

function caring(): Entry[] {
  return [
    { label: '$(debug-restart) Restart the server', command: 'infill.restart' },
    { label: '$(debug-restart) Restart the engine', command: 'infill.restartEngine' },
    { label: '$(output) Log', command: 'infill.showLog' },
    { label: '$(trash) Remove all data', command: 'infill.removeData' },
    { label: '$(gear) Settings', command: 'workbench.action.openSettings', arguments: ['@ext:infill-lsp.infill'] },
  ];
}

function icon(isOff: boolean): string {
  return isOff ? '$(check)' : '$(circle-slash)';
}

export async function chooseAggressiveness(): Promise<void> {
  const configuration = vscode.workspace.getConfiguration('infill', vscode.window.activeTextEditor?.document);
  const says = { quiet: 'fewer suggestions, surer ones', balanced: 'the default', eager: 'more suggestions' };
  const now = configuration.get('aggressiveness');
  const entries = levels.map((label) => ({ label, description: says[label], detail: label === now ? 'chosen now' : '' }));
  const chosen = await vscode.window.showQuickPick(entries, { title: 'How sure a suggestion must be' });
  if (chosen !== undefined) {
    await set('aggressiveness', () => chosen.label);
  }
}
