#!/usr/bin/env python3
"""Says when a cloud is about to take this instance: `aelastic --notice-command "python notice.py aws" ...`.

aws, google or azure.  Writes `drain SECONDS spot` when the instance is to go, and `cancel` when it stays after all.  A
metadata service that is slow, away or talks nonsense is asked again.  docs/how-to/cloud.md explains it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

AWS = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
GOOGLE = "http://" + os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
AZURE = os.environ.get("AZURE_METADATA_ENDPOINT", "http://169.254.169.254")
INTERVAL_S = float(os.environ.get("NOTICE_INTERVAL", "2"))
TIMEOUT_S, ANSWER_BYTES = 5.0, 1 << 20
# Google says nothing of when: 30 s, of which some have passed.
GOOGLE_S = 25.0
# Azure's events that end an instance, or its processes.
AZURE_EVENTS = {"Preempt", "Terminate", "Reboot", "Redeploy"}


def ask(url: str, method: str = "GET", **headers: str) -> str:
    """What the service answers; nothing where it has nothing of the kind."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, headers=named, method=method), timeout=TIMEOUT_S) as answer:  # noqa: S310
            return str(answer.read(ANSWER_BYTES).decode())
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise


def aws() -> "float | None":
    """Seconds that are left to the instance; none: it is not to go."""
    token = ask(f"{AWS}/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    text = ask(f"{AWS}/latest/meta-data/spot/instance-action", X_aws_ec2_metadata_token=token)
    return until(datetime.fromisoformat(json.loads(text)["time"])) if text else None


def google() -> "float | None":
    text = ask(f"{GOOGLE}/computeMetadata/v1/instance/preempted", Metadata_Flavor="Google")
    if text.strip() not in {"TRUE", "FALSE"}:
        raise ValueError(text)
    return GOOGLE_S if text.strip() == "TRUE" else None


def azure() -> "float | None":
    text = ask(f"{AZURE}/metadata/scheduledevents?api-version=2020-07-01", Metadata="true")
    times = [each["NotBefore"] for each in json.loads(text)["Events"] if each["EventType"] in AZURE_EVENTS]
    return min((until(parsedate_to_datetime(each)) if each else 1.0 for each in times), default=None)


def until(at: datetime) -> float:
    return (at - datetime.now(UTC)).total_seconds()


def watch(look: "Callable[[], float | None]") -> None:
    is_told = False
    while True:
        try:
            left_s = look()
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            pass  # it is asked again
        else:
            if left_s is not None and not is_told:
                print(f"drain {max(1.0, left_s):.0f} spot", flush=True)
            elif left_s is None and is_told:
                print("cancel", flush=True)
            is_told = left_s is not None
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    clouds = {"aws": aws, "google": google, "azure": azure}
    if sys.argv[1:] and sys.argv[1] in clouds:
        watch(clouds[sys.argv[1]])
    sys.exit(f"notice.py: say which cloud it is: {', '.join(clouds)}")
