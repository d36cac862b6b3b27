r"""An HTTP service that starts training jobs on its machine, shows their state, and stops them.

    pip install fastapi uvicorn
    TRAININGS=. uvicorn fastapi_app:app

    curl localhost:8000/jobs -H 'content-type: application/json' \
        -d '{"script": "ddp.py", "args": ["--epochs", "10"], "workers": 2, "max_restarts": 3}'
    curl localhost:8000/jobs/1
    curl -X DELETE localhost:8000/jobs/1

Jobs are coroutines in the service's event loop, so the service keeps answering requests.  When it ends, it stops its
jobs and waits for them.  It starts only scripts in the folder `TRAININGS`.  The service has no authentication: put it
behind something that authenticates.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from aelastic import AelasticError, Observer, Supervisor, WorkerSpec
from aelastic.observe import run_events as ev

if not os.environ.get("TRAININGS"):
    sys.exit("fastapi_app: set TRAININGS to the folder with the scripts that it may start")
TRAININGS = Path(os.environ["TRAININGS"]).resolve()


class JobRequest(BaseModel):
    """The body of a request that starts a job."""

    script: str
    args: list[str] = []
    workers: int = 1
    max_restarts: int = 0


@dataclass
class Job(Observer):
    """A job and its latest run events."""

    supervisor: Supervisor = field(init=False)
    events: list[str] = field(default_factory=list)
    end: str = ""

    def tell(self, event: ev.RunEvent, now: float) -> None:
        self.events = [*self.events[-99:], type(event).__name__]

    async def run_job(self) -> None:
        try:
            result = await self.supervisor.run()
            self.end = result.reason or result.state.name
        except AelasticError as error:
            self.end = str(error)

    def described(self) -> dict[str, Any]:
        workers = {worker.global_rank: worker.id for worker in self.supervisor.workers}
        return {"state": self.supervisor.state.name, "workers": workers, "end": self.end, "events": self.events}


jobs: dict[int, Job] = {}
running: asyncio.TaskGroup


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    global running
    async with asyncio.TaskGroup() as running:
        yield
        for job in jobs.values():
            job.supervisor.stop()


app = FastAPI(lifespan=lifespan)


def job_of(number: int) -> Job:
    if number not in jobs:
        raise HTTPException(404, f"there is no job {number}")
    return jobs[number]


@app.post("/jobs", status_code=201)
async def start(request: JobRequest) -> dict[str, int]:
    script = (TRAININGS / request.script).resolve()
    if not (script.is_relative_to(TRAININGS) and script.is_file()):
        raise HTTPException(422, f"script: there is no {request.script} in {TRAININGS}")
    try:
        spec = WorkerSpec(
            entrypoint=sys.executable,
            args=("-u", str(script), *request.args),
            local_world_size=request.workers,
            max_restarts=request.max_restarts,
        )
    except AelasticError as error:
        raise HTTPException(422, str(error)) from None
    job = Job()
    job.supervisor = Supervisor(spec, observers=[job])
    number = len(jobs) + 1
    jobs[number] = job
    running.create_task(job.run_job())
    return {"job": number}


@app.get("/jobs/{number}")
async def status(number: int) -> dict[str, Any]:
    return job_of(number).described()


@app.delete("/jobs/{number}")
async def stop(number: int) -> dict[str, Any]:
    """Stops a job: its workers get SIGTERM and can save.  A second request kills them."""
    job_of(number).supervisor.stop()
    return job_of(number).described()
