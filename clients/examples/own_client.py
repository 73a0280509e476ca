"""The project's own client: a whole answer, then one as it comes."""

import sys

from clients import Client, ClientError, Message

messages: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]

with Client() as client:  # SPD_BASE_URL and SPD_API_KEY, else port 8000 of this machine
    try:
        answer = client.chat(messages, temperature=0, max_tokens=32)
        print(answer.text)
        with client.stream_chat(messages, temperature=0, max_tokens=32) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        print()
    except ClientError as error:
        sys.exit(str(error))
