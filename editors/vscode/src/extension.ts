/** Puts the parts together: the server, what is offered, the switches, the item in the status bar and the commands. */

import * as vscode from 'vscode';

import { DenoiseView } from './denoise';
import { Fill, type Order } from './fill';
import { chooseAggressiveness, showMenu } from './menu';
import { Previews } from './preview';
import { isProgram } from './program';
import { Rivals } from './rivals';
import { Server } from './server';
import { Setup } from './setup';
import { inWords, StatusBar, type ServerStatus } from './status';
import { Suggestions } from './suggestions';
import { Switches, toggleEverywhere, toggleLanguage } from './switches';

class Infill implements vscode.Disposable {
  private readonly log = vscode.window.createOutputChannel('Infill', { log: true });
  private readonly bar = new StatusBar();
  private readonly previews = new Previews();
  readonly switches: Switches;
  readonly suggestions: Suggestions;
  readonly fill: Fill;
  readonly view: DenoiseView;
  readonly server: Server;
  readonly setup: Setup;
  /** What the server said last, and what is shown of that. */
  private heard: ServerStatus = { state: 'starting' };
  private status: ServerStatus = { state: 'starting' };
  /** Statuses that were asked for or heard so far, and which of them is shown. */
  private orders = 0;
  private shown = 0;
  /** Starts and stops follow one another: two restarts in a row must not race. */
  private last: Promise<void> = Promise.resolve();

  constructor(context: vscode.ExtensionContext) {
    this.switches = new Switches(context.workspaceState);
    this.suggestions = new Suggestions(() => this.server.client, this.switches, this.previews);
    this.view = new DenoiseView(context.extensionUri, (isWatching) => this.server.watch(isWatching));
    this.fill = new Fill(() => this.server.client, this.previews);
    this.setup = new Setup(context, this.log, () => this.show(this.heard, this.shown));
    this.server = new Server(
      this.log,
      {
        status: (status) => void this.told(status),
        canvas: (frame) => this.view.show(frame),
        refresh: (refresh) => void this.suggestions.refresh(refresh),
        configured: () => void this.look(),
      },
      {
        provideInlineCompletionItems: (...question) => this.suggestions.provide(...question),
        executeCommand: (command, given, next) => {
          if (command === 'infill.server.fill') {
            return this.fill.ordered(given[0] as Order);
          }
          if (command === 'infill.server.accepted') {
            this.suggestions.accepted(given[0]);
          }
          return next(command, given);
        },
      },
      () => this.setup.settings,
    );
  }

  restart(): Promise<void> {
    this.last = this.last.then(async () => {
      await this.server.stop();
      await this.start();
    });
    return this.last;
  }

  /** Makes what is missing, also what a person did not want before. */
  async setUp(): Promise<void> {
    await this.setup.wanted();
    await this.restart();
  }

  removeData(): Promise<void> {
    return this.setup.removeData(async () => {
      await this.server.endEngine();
      await this.server.stop();
    });
  }

  showLog(): void {
    this.log.show();
  }

  menu(): Promise<void> {
    return showMenu(inWords(this.status), this.switches, this.setup.status !== undefined);
  }

  /** Shows how things are in the editor that is looked at now.
   *
   * otherwise: what is shown where the server does not say. */
  async look(otherwise?: ServerStatus): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const order = ++this.orders;
    const status = (await this.server.status(editor?.document)) ?? otherwise;
    if (status !== undefined && editor === vscode.window.activeTextEditor) {
      this.show(status, order);
    }
  }

  /** Why something or nothing is offered at the cursor. */
  async why(): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    const client = this.server.client;
    if (editor === undefined || !client?.isRunning() || this.setup.status !== undefined) {
      void vscode.window.showInformationMessage(`Infill: ${editor === undefined ? 'no editor is open' : inWords(this.status)}`);
      return;
    }
    let reason = this.switches.off(editor);
    if (reason === undefined) {
      const { uri } = editor.document;
      const textDocument = { uri: client.code2ProtocolConverter.asUri(uri) };
      const position = client.code2ProtocolConverter.asPosition(editor.selection.active);
      reason = (await client.sendRequest<{ reason: string }>('infill/why', { textDocument, position })).reason;
    }
    void vscode.window.showInformationMessage(`Infill: ${reason}`);
  }

  async statistics(): Promise<void> {
    const text = await this.order<string>('infill.server.stats');
    if (text !== undefined) {
      await vscode.window.showTextDocument(this.previews.add(vscode.Uri.file('/Infill statistics'), text), { preview: true });
    }
  }

  async restartEngine(): Promise<void> {
    await this.order('infill.server.restartEngine');
  }

  async dispose(): Promise<void> {
    this.setup.dispose(); // First: a set-up that is under way would be waited for.
    await this.last;
    await this.server.stop();
    [this.switches, this.fill, this.previews, this.view, this.bar, this.log].forEach((part) => part.dispose());
  }

  /** A command of the server's, which is there only while that runs. */
  private async order<T>(command: string): Promise<T | undefined> {
    if (!this.server.client?.isRunning()) {
      void vscode.window.showWarningMessage(`Infill: the server is not running (${inWords(this.status)}).`);
      return undefined;
    }
    return vscode.commands.executeCommand<T>(command);
  }

  private async start(): Promise<void> {
    const program = await this.setup.server();
    if (program === undefined) {
      return; // Why, the set-up has said.
    }
    if (!isProgram(program)) {
      const problem = `infill.server.path is ${program}, which is not a program.`;
      this.show({ state: 'error', message: problem });
      this.log.error(problem);
      void offerSetting(problem);
      return;
    }
    this.show({ state: 'starting' });
    await this.server.start(program);
    await this.look();
    void this.engine();
  }

  /** The engine's environment takes a person's word, and minutes: the server is there meanwhile. */
  async engine(): Promise<void> {
    if (await this.setup.engine()) {
      await this.server.settingsChanged();
      await this.look();
    }
  }

  /** The server tells of a change, for no document: what is off in this one it is asked for. */
  private async told(status: ServerStatus): Promise<void> {
    if (status.state === 'ready') {
      await this.look(status);
    } else {
      this.show(status);
    }
  }

  /** An answer that comes after something newer was shown is late: the server may have ended meanwhile. */
  private show(heard: ServerStatus, order = ++this.orders): void {
    if (order < this.shown) {
      return;
    }
    this.shown = order;
    this.heard = heard;
    const off = heard.state === 'error' ? undefined : this.switches.off(vscode.window.activeTextEditor);
    this.status = this.setup.status ?? (off === undefined ? heard : { ...heard, state: 'off', message: off });
    this.bar.show(this.status);
  }
}

async function offerSetting(problem: string): Promise<void> {
  const open = 'Open setting';
  if ((await vscode.window.showErrorMessage(problem, open)) === open) {
    await vscode.commands.executeCommand('workbench.action.openSettings', 'infill.server.path');
  }
}

export function activate(context: vscode.ExtensionContext): void {
  const infill = new Infill(context);
  const rivals = new Rivals(context.globalState);
  const commands: Record<string, (...given: never[]) => unknown> = {
    'infill.menu': () => infill.menu(),
    'infill.trigger': () => infill.suggestions.trigger(),
    'infill.acceptWord': () => infill.suggestions.acceptPart('Word'),
    'infill.acceptLine': () => infill.suggestions.acceptPart('Line'),
    'infill.dismiss': () => vscode.commands.executeCommand('editor.action.inlineSuggest.hide'),
    'infill.next': () => vscode.commands.executeCommand('editor.action.inlineSuggest.showNext'),
    'infill.previous': () => vscode.commands.executeCommand('editor.action.inlineSuggest.showPrevious'),
    'infill.showLast': () => infill.suggestions.showLast(),
    'infill.fillSelection': () => infill.fill.selection(),
    'infill.fillHoles': () => infill.fill.holes(),
    'infill.fillCursors': () => infill.fill.cursors(),
    'infill.acceptFill': () => infill.fill.accept(),
    'infill.rejectFill': () => infill.fill.reject(),
    'infill.denoise': () => infill.view.open(),
    'infill.toggle': toggleEverywhere,
    'infill.toggleLanguage': async () => {
      const language = vscode.window.activeTextEditor?.document.languageId;
      await (language && toggleLanguage(language));
    },
    'infill.toggleFile': async () => {
      const file = vscode.window.activeTextEditor?.document.uri;
      await (file && infill.switches.toggleFile(file));
    },
    'infill.snooze': async (minutes?: number) => {
      const chosen = minutes ?? (await vscode.window.showQuickPick(['5', '15', '60'], { title: 'Snooze for how many minutes?' }));
      if (chosen !== undefined) {
        infill.switches.snooze(Number(chosen));
        await vscode.commands.executeCommand('infill.dismiss');
      }
    },
    'infill.wake': () => infill.switches.wake(),
    'infill.chooseAggressiveness': chooseAggressiveness,
    'infill.why': () => infill.why(),
    'infill.statistics': () => infill.statistics(),
    'infill.restart': () => infill.restart(),
    'infill.restartEngine': () => infill.restartEngine(),
    'infill.showLog': () => infill.showLog(),
    'infill.setUp': () => infill.setUp(),
    'infill.removeData': () => infill.removeData(),
  };
  context.subscriptions.push(
    infill,
    rivals,
    ...Object.entries(commands).map(([id, run]) => vscode.commands.registerCommand(id, run)),
    infill.switches.onDidChange(() => infill.look()),
    vscode.window.onDidChangeActiveTextEditor(() => infill.look()),
    vscode.workspace.onDidChangeConfiguration((event) => {
      if (event.affectsConfiguration('infill.server')) {
        void infill.restart();
      } else if (event.affectsConfiguration('infill.engine')) {
        void infill.engine(); // There may be none to install any more, or one now.
      }
    }),
    vscode.workspace.onDidGrantWorkspaceTrust(() => infill.restart()),
  );
  void infill.restart();
  rivals.look();
}
