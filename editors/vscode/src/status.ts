/** One small item in the status bar. Knows how a state looks, not where it comes from. */

import * as vscode from 'vscode';

/** What the server tells in `infill/status`. */
export interface ServerStatus {
  state: 'off' | 'stopped' | 'starting' | 'fetching' | 'ready' | 'busy' | 'error';
  /** One line for people; empty if there is nothing to say. */
  message?: string;
  /** 0 to 1 while fetching; null where unknown. */
  progress?: number | null;
  model?: string;
  /** Where the model runs, such as `cpu`; empty before it is ready. */
  device?: string;
}

const looks = {
  off: { icon: '$(circle-slash)', says: 'off' },
  stopped: { icon: '$(sparkle)', says: 'the engine is not running; it starts when it is needed' },
  starting: { icon: '$(loading~spin)', says: 'starting' },
  fetching: { icon: '$(cloud-download)', says: 'fetching the model' },
  ready: { icon: '$(sparkle)', says: 'ready' },
  busy: { icon: '$(sparkle-filled)', says: 'working' },
  error: { icon: '$(warning)', says: 'not working' },
} as const;

/** A state in one line. */
export function inWords({ state, message, model, device }: ServerStatus): string {
  const where = ['ready', 'busy'].includes(state) ? [model, device].filter(Boolean).join(' on ') : '';
  const says = state === 'off' && message ? `off here: ${message}` : message || looks[state].says;
  return [says, where].filter(Boolean).join(': ');
}

export class StatusBar implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem('infill.status', vscode.StatusBarAlignment.Right, 100);

  constructor() {
    this.item.name = 'Infill';
    this.item.command = 'infill.menu';
  }

  show(status: ServerStatus): void {
    const { state, progress } = status;
    const percent = typeof progress === 'number' && state === 'fetching' ? ` ${Math.floor(progress * 100)}%` : '';
    this.item.text = `${looks[state].icon} Infill${percent}`;
    this.item.tooltip = `Infill: ${inWords(status)}`;
    this.item.backgroundColor =
      state === 'error' ? new vscode.ThemeColor('statusBarItem.warningBackground') : undefined;
    this.item.show();
  }

  dispose(): void {
    this.item.dispose();
  }
}
