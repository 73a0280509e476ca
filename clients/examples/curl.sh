#!/bin/sh
# By hand: a whole answer, then one as server-sent events.
url=${SPD_BASE_URL:-http://127.0.0.1:8000}
key=${SPD_API_KEY:-none}
ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" \
    --header "Authorization: Bearer $key" --header 'Content-Type: application/json' --data "$1"
}

model=$(curl --silent --show-error --fail "$url/v1/models" --header "Authorization: Bearer $key" |
  sed 's/.*"id":"\([^"]*\)".*/\1/')
messages='[{"role": "user", "content": "What is the capital of France?"}]'

ask "{\"model\": \"$model\", \"messages\": $messages, \"temperature\": 0, \"max_tokens\": 32}"
echo
ask "{\"model\": \"$model\", \"messages\": $messages, \"temperature\": 0, \"max_tokens\": 32,
  \"stream\": true}"
