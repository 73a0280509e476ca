"""The official `openai` client for Python: pip install openai"""

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

url = os.environ.get("SPD_BASE_URL", "http://127.0.0.1:8000")
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]

with OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SPD_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=32
    )
    print(answer.choices[0].message.content)
    stream = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=32, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
