"""Prompts of several kinds for the default model: chats, and texts to continue."""

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": content}]
    for content in (
        "What is the capital of France? Tell me about it.",
        "List the numbers from 1 to 30, separated by commas.",
        "日本の首都はどこですか。",
        "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 12,
        "Write a Python function that adds two numbers, with a docstring.",
        "Translate to German: The weather is nice today, and we are going for a walk.",
        "Explain photosynthesis in two sentences.",
        "Écris un poème sur la mer, s'il te plaît.",
        "Repeat the word 'pipeline' twenty times.",
        "A train goes 60 km in 45 minutes. What is its speed in km/h? Think step by step.",
        "Give me a JSON object with the fields name, age and city.",
        "What's the difference between a list and a tuple in Python? Show code.",
        "Write a haiku about 🍂 and 🍁.",
        "Name five fruits, one on each line, with a number before each.",
    )
]
CHATS += [
    [
        {"role": "system", "content": "You are a pirate. Answer in one sentence."},
        {"role": "user", "content": "Where is the treasure?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]

TEXTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<html>\n  <head>\n    <title>",
    "1, 2, 4, 8, 16, 32,",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
]
