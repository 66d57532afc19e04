"""Load on a server: streams for a while, or bursts of requests at once. Prints one line of JSON last.

load.py ADDRESS MODEL --streams N --tokens T --seconds S      N requests at a time, T tokens each
load.py ADDRESS MODEL --bursts 1,16,8 --tokens T --seconds S  bursts of these sizes in turn; without S once through
load.py ADDRESS MODEL --answers N --seconds S                 N at a time of questions that the tiny models know
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import threading
import time
from typing import Any

KNOWN = (
    "Write a Python function is_prime(n) that returns True if n is prime. Answer with one code block only.",
    "Reply with the single word OK.",
)


def post(address: str, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One request; its status (None when it broke off), seconds, tokens, and what was answered."""
    since = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        done = json.loads(content) if answer.status == 200 else {}
        return {
            "status": answer.status, "seconds": time.monotonic() - since,
            "tokens": done.get("usage", {}).get("completion_tokens", 0),
            "text": (done.get("choices") or [{}])[0].get("message", {}).get("content", ""),
            "error": "" if answer.status == 200 else content.decode(errors="replace")[:300],
        }  # fmt: skip
    except (OSError, http.client.HTTPException, ValueError) as error:
        seconds = time.monotonic() - since
        return {"status": None, "seconds": seconds, "tokens": 0, "text": "", "error": repr(error)[:300]}
    finally:
        connection.close()


def ask(address: str, model: str, prompt: list[int], tokens: int, timeout_s: float) -> dict[str, Any]:
    """One completion of exactly `tokens` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return post(address, "/v1/completions", body, timeout_s)


def chat(address: str, model: str, question: str, timeout_s: float) -> dict[str, Any]:
    """One greedy answer."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 256, "temperature": 0,
            "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    return post(address, "/v1/chat/completions", body, timeout_s)


def prompt_of(draw: random.Random, length: int) -> list[int]:
    """Random ids, above the special ones."""
    return [draw.randrange(1000, 200000) for _ in range(length)]


def at_once(address: str, model: str, jobs: list[tuple[list[int], int]], timeout_s: float) -> list[dict[str, Any]]:
    """All jobs at the same time."""
    results: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda job=job: results.append(ask(address, model, job[0], job[1], timeout_s)))
        for job in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def streams(address: str, model: str, count: int, tokens: int, seconds: float) -> dict[str, Any]:
    """`count` requests always under way; tokens a second over the time in which all were."""
    draw = random.Random(0)
    ask(address, model, prompt_of(draw, 256), 16, 120)
    until = time.monotonic() + seconds
    lock = threading.Lock()
    done: list[dict[str, Any]] = []

    def one(seed: int) -> None:
        own = random.Random(seed)
        while time.monotonic() < until:
            result = ask(address, model, prompt_of(own, 256), tokens, 120)
            with lock:
                done.append(result)
            if result["status"] != 200:
                return

    since = time.monotonic()
    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.monotonic() - since
    good = [result for result in done if result["status"] == 200]
    per = sorted(result["tokens"] / result["seconds"] for result in good)
    return {
        "streams": count, "requests": len(done), "failed": [r["error"] for r in done if r["status"] != 200][:3],
        "tokens_per_s": round(sum(r["tokens"] for r in good) / wall, 1), "wall_s": round(wall, 1),
        "tokens_per_s_stream_median": round(per[len(per) // 2], 1) if per else 0,
    }  # fmt: skip


def bursts(address: str, model: str, sizes: list[int], tokens: int, seconds: float) -> dict[str, Any]:
    """Bursts in turn, prompts and answers of mixed lengths, until time is over or one fails."""
    draw = random.Random(1)
    until = time.monotonic() + seconds
    counts: list[list[Any]] = []
    since = time.monotonic()
    for number, size in enumerate(itertools.cycle(sizes)):
        if number >= len(sizes) and time.monotonic() > until:
            break
        jobs = [
            (prompt_of(draw, draw.choice([20, 100, 256, 700, 2000])), draw.randrange(tokens // 2, tokens * 2))
            for _ in range(size)
        ]
        results = at_once(address, model, jobs, 180)
        bad = [result for result in results if result["status"] != 200]
        counts.append([size, round(max(result["seconds"] for result in results), 2), len(bad)])
        if bad:
            return {
                "bursts": counts,
                "died": True,
                "at_s": round(time.monotonic() - since, 1),
                "error": bad[0]["error"],
            }
    return {"bursts": len(counts), "requests": sum(entry[0] for entry in counts), "died": False,
            "wall_s": round(time.monotonic() - since, 1), "slowest_s": max(entry[1] for entry in counts),
            "first": counts[:6], "last": counts[-6:]}  # fmt: skip


def answers(address: str, model: str, count: int, seconds: float) -> dict[str, Any]:
    """`count` clients, each asking one known question after the other; how many answers differ from those alone.

    Answers of unlike lengths come and go at different times, so the requests of a step are never the same for long.
    """
    alone = {question: chat(address, model, question, 120)["text"] for question in KNOWN}
    until = time.monotonic() + seconds
    lock = threading.Lock()
    results: list[tuple[str, dict[str, Any]]] = []

    def one(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            question = draw.choice(KNOWN)
            result = chat(address, model, question, 60)
            with lock:
                results.append((question, result))
            if result["status"] != 200:
                return

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answered = [(question, result["text"]) for question, result in results if result["status"] == 200]
    wrong = [text for question, text in answered if text != alone[question]]
    return {"clients": count, "answers": len(answered), "wrong": len(wrong), "examples": [t[:200] for t in wrong[:3]],
            "failed": [result["error"] for _, result in results if result["status"] != 200][:3],
            "alone": {question[:20]: text[:80] for question, text in alone.items()}}  # fmt: skip


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--bursts", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--answers", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0)
    given = parser.parse_args()
    if given.answers:
        result = answers(given.address, given.model, given.answers, given.seconds)
    elif given.bursts:
        result = bursts(given.address, given.model, given.bursts, given.tokens, given.seconds)
    else:
        result = streams(given.address, given.model, given.streams, given.tokens, given.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
