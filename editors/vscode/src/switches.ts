/** Where suggestions are switched off by this extension: for a while, in single files, in views that are not for writing.
 *
 * What is off by a setting (globally, by language, by pattern) the server decides.
 */

import * as vscode from 'vscode';

const filesKey = 'infill.filesOff';

export class Switches implements vscode.Disposable {
  private readonly changed = new vscode.EventEmitter<void>();
  readonly onDidChange = this.changed.event;
  private snoozedUntil = 0;
  private timer: NodeJS.Timeout | undefined;

  constructor(private readonly memory: vscode.Memento) {}

  /** Why nothing is offered in an editor; undefined where something may be. */
  off(editor: vscode.TextEditor | undefined): string | undefined {
    if (this.snoozed) {
      return `snoozed until ${this.snoozed.toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' })}`;
    }
    if (editor === undefined) {
      return undefined;
    }
    return this.isOff(editor.document.uri) ? 'switched off for this file' : unfit(editor);
  }

  /** When the snooze ends; undefined without one. */
  get snoozed(): Date | undefined {
    return Date.now() < this.snoozedUntil ? new Date(this.snoozedUntil) : undefined;
  }

  snooze(minutes: number): void {
    clearTimeout(this.timer);
    this.snoozedUntil = Date.now() + minutes * 60_000;
    this.timer = setTimeout(() => this.wake(), minutes * 60_000);
    this.changed.fire();
  }

  wake(): void {
    clearTimeout(this.timer);
    this.snoozedUntil = 0;
    this.changed.fire();
  }

  isOff(file: vscode.Uri): boolean {
    return this.files.includes(file.toString());
  }

  async toggleFile(file: vscode.Uri): Promise<void> {
    const name = file.toString();
    const others = this.files.filter((other) => other !== name);
    await this.memory.update(filesKey, this.isOff(file) ? others : [...others, name]);
    this.changed.fire();
  }

  dispose(): void {
    clearTimeout(this.timer);
    this.changed.dispose();
  }

  private get files(): readonly string[] {
    return this.memory.get<string[]>(filesKey, []);
  }
}

/** Sets it where it is set already, as narrowly as that is, since nothing wider would count; else for the person. */
export async function set(setting: string, change: (value: unknown) => unknown): Promise<void> {
  const configuration = vscode.workspace.getConfiguration('infill', vscode.window.activeTextEditor?.document);
  const found = configuration.inspect(setting);
  const { Global, Workspace, WorkspaceFolder } = vscode.ConfigurationTarget;
  const places = [[found?.workspaceFolderValue, WorkspaceFolder] as const, [found?.workspaceValue, Workspace] as const];
  const [value, target] = places.find(([one]) => one !== undefined) ?? [found?.globalValue ?? found?.defaultValue, Global];
  await configuration.update(setting, change(value), target);
}

/** Whether it is on, where nothing else says otherwise. */
export async function switchEverywhere(isOn: boolean): Promise<void> {
  await set('enabled', () => isOn);
}

export async function toggleEverywhere(): Promise<void> {
  await set('enabled', (isOn) => isOn === false);
}

export function isLanguageOff(language: string): boolean {
  const configuration = vscode.workspace.getConfiguration('infill', vscode.window.activeTextEditor?.document);
  const languages = configuration.get<Record<string, boolean>>('languages', {});
  return !(languages[language] ?? languages['*'] ?? true);
}

export async function toggleLanguage(language: string): Promise<void> {
  const isOn = isLanguageOff(language);
  await set('languages', (languages) => ({ ...(languages as Record<string, boolean>), [language]: isOn }));
}

/** Why an editor is not one to write in. */
function unfit(editor: vscode.TextEditor): string | undefined {
  const input = vscode.window.tabGroups.activeTabGroup.activeTab?.input;
  const here = editor.document.uri.toString();
  if (input instanceof vscode.TabInputTextDiff && [input.original, input.modified].some((uri) => uri.toString() === here)) {
    return 'nothing is offered in a comparison';
  }
  if (input instanceof vscode.TabInputNotebookDiff) {
    return 'nothing is offered in a comparison';
  }
  // Editors inside of other views, such as a peek, have no column; neither have a notebook's cells.
  if (editor.viewColumn === undefined && editor.document.uri.scheme !== 'vscode-notebook-cell') {
    return 'nothing is offered in a peek';
  }
  return undefined;
}
