"""`spd-eval`: how well each drafter does on given prompts, counted by the served engine itself."""
