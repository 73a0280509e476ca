"""Text in, tokens out, and back: tokenizer, chat template, text that streams, stop strings."""
