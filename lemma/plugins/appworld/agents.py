"""What an agent reads before its first turn, how code is found in what it says, and how it reads what the code printed.

Two agents: one whose conversation grows turn by turn, as in LOOP; one whose single prompt is written anew each turn,
with the steps so far in it, and which answers in `<think>` and `<code>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from lemma.plugins.appworld.appworld_tasks import AppTask

Agent = Literal["conversation", "rebuilt"]

CONVERSATION = """\
I am {name}, and you are my assistant. You do a task for me, on your own, in my apps: Amazon, Gmail, Spotify, Venmo, \
Splitwise, Todoist, Simple Note, my phone and my files. You act by writing Python, which runs in a session that keeps \
its variables. What the code prints is what you read next.

The apps are reached through `apis`, as `apis.APP.API(parameter=value)`. Three APIs explain all others:

print(apis.api_docs.show_app_descriptions())
print(apis.api_docs.show_api_descriptions(app_name='simple_note'))
print(apis.api_docs.show_api_doc(app_name='simple_note', api_name='login'))

Rules:
- In each turn write one block of code, between ```python and ```. Keep it short, and read what it prints before the \
next.
- Read an API's document before you call it the first time.
- My passwords are in `apis.supervisor.show_account_passwords()`, my addresses, cards and personal data in other \
APIs of `supervisor`. An app's `login` gives an access token, which most of its other APIs want.
- APIs that list things give one page at a time: go through all pages.
- Times and dates are those of the apps. "Friends" or "family" are what my phone's contacts say.
- Never make up anything; nobody answers questions in between.
- When the task is done, call `apis.supervisor.complete_task()`, and where I asked for something, \
`apis.supervisor.complete_task(answer=...)` with the bare answer. If it cannot be done, call \
`apis.supervisor.complete_task(status='fail')`.

My name is {name}, my email {email}, my phone number {phone}. It is {now}.

The task: {instruction}"""

REBUILT = """\
You do tasks in the apps of a person by writing Python. Each step runs in the same session, and what it prints is \
shown to you in the next.

Who you work for: {name}, email {email}, phone number {phone}. It is {now}.
The task: {instruction}

How to find out what there is: `apis.api_docs.show_app_descriptions()`, \
`apis.api_docs.show_api_descriptions(app_name=...)`, `apis.api_docs.show_api_doc(app_name=..., api_name=...)`. \
Passwords: `apis.supervisor.show_account_passwords()`; most APIs want the access token that an app's `login` gives. \
When the task is done: `apis.supervisor.complete_task()`, or with `answer=...` where something was asked.

Steps so far: {count}.{shown}
{history}
This is step {step}. Think first, then write the code of this step alone:
<think>what you know and what comes next</think>
<code>Python</code>"""

BLOCK = re.compile(r"```(?:python|py)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
NO_CODE = {
    "conversation": "No code was found. Write one block between ```python and ```.",
    "rebuilt": "No code was found. Write it between <code> and </code>.",
}


def first_prompt(agent: Agent, task: AppTask) -> str:
    """The agent's first prompt."""
    return rebuilt_prompt(task, []) if agent == "rebuilt" else CONVERSATION.format(**_about(task))


def rebuilt_prompt(task: AppTask, steps: Sequence[tuple[str, str]], most: int | None = None) -> str:
    """The prompt of the agent that has no conversation, after these steps of code and output; `most` shows the last."""
    shown = list(enumerate(steps, 1))[-most if most else 0 :]
    left_out = len(steps) - len(shown)
    return REBUILT.format(
        **_about(task),
        count=len(steps),
        shown=f" The last {len(shown)} are:" if left_out else " They are:" if shown else "",
        history="".join(f"\nStep {i}\nCode:\n{code}\nOutput:\n{output}\n" for i, (code, output) in shown),
        step=len(steps) + 1,
    )


def code_of(agent: Agent, text: str) -> str:
    """The code that an agent means to run; empty where there is none.

    Several blocks of a conversation are one after the other, and a block that was cut off counts. The other agent may
    fence its code, and may leave out the tags behind its thoughts.
    """
    blocks = [block.strip("\n") for block in BLOCK.findall(text)]
    if agent == "conversation":
        return "\n".join(blocks)
    if blocks:
        return blocks[-1]
    tagged = CODE.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    _, thought, rest = text.rpartition("</think>")
    return rest.strip() if thought else ""


def heard(output: str) -> str:
    """The output of the code, as the next message of a conversation."""
    return f"Output:\n```\n{output.rstrip()}\n```"


def _about(task: AppTask) -> dict[str, str]:
    return {
        "name": f"{task.supervisor['first_name']} {task.supervisor['last_name']}",
        "email": task.supervisor["email"],
        "phone": task.supervisor["phone_number"],
        "now": task.datetime,
        "instruction": task.instruction,
    }
