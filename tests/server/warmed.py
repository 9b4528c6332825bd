"""What the fork server imports: it then has torch, the data and all modules, and a process starts in no time."""

from tests.server.kills import warm

warm()
