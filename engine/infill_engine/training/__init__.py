"""How the embedded model's adapter is trained: the text, the gaps cut out of it, and the loop. Nothing that serves
imports it."""
