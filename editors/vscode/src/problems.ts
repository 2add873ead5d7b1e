/** Says what does not work, with what can be done about it, and the log. */

import * as vscode from 'vscode';

/** cure: what the button says that runs `command`. */
export async function sayProblem(problem: string, cure: string, command: string): Promise<void> {
  const log = 'Show log';
  const chosen = await vscode.window.showErrorMessage(problem, cure, log);
  if (chosen !== undefined) {
    await vscode.commands.executeCommand(chosen === cure ? command : 'infill.showLog');
  }
}
