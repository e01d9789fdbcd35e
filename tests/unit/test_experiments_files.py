"""Whatever a script does to files while the doctor runs it, the user's are as before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import textwrap
from collections import deque
from pathlib import Path

import pytest

from gradflow_export.experiments.laboratory import Laboratory
from gradflow_export.experiments.runs import Request
from gradflow_export.experiments.target import Target

WRITERS = {
    "appends": "open('log.txt', 'a').write('x')",
    "checkpoints": "torch.save(model.state_dict(), 'model.pt')",
    "overwrites itself": "open(__file__, 'w').write('gone')",
    "removes data": "os.remove('data.bin')",
    "renames data": "os.rename('data.bin', 'other.bin')",
    "empties a folder": "shutil.rmtree('old')",
    "makes folders": "os.makedirs('runs/1/2', exist_ok=True)",
    "changes rights": "os.chmod('data.bin', 0o600)",
    "links": "os.symlink('data.bin', 'latest')",
    "touches": "os.utime('data.bin', (1, 1))",
    "commits": "subprocess.run(['git', 'commit', '-qam', 'run', '--allow-empty'], check=False)",
    "cleans": "subprocess.run(['git', 'clean', '-fdxq'], check=False)",
    "writes by a shell": "os.system('echo x > shell.txt; rm -f data.bin')",
    "caches at home": "(pathlib.Path.home() / '.cache').mkdir(); (pathlib.Path.home() / '.cache' / 'x').write_text('x')",
    "configures at home": "(pathlib.Path.home() / '.netrc').write_text('x')",
    "keeps a database": "sqlite3.connect('runs.db').execute('create table t (x)')",
    "keeps arrays": "numpy.save('data.bin', numpy.zeros(3)); numpy.memmap('map', mode='w+', shape=(9,))",
    "logs to TensorBoard": "from torch.utils.tensorboard import SummaryWriter as W; W('tb').add_scalar('loss', 1.0)",
    "logs to W&B": "os.environ['WANDB_MODE'] = 'offline'; import wandb; wandb.init(project='p').log({'loss': 1.0})",
    "leaves a process": "subprocess.Popen(['sh', '-c', 'sleep 20; echo x > late.txt'])",
    "loads with workers": "list(torch.utils.data.DataLoader(Rows(), 2, num_workers=2))",
}
"""What scripts do to files, by a name for it."""

TOGETHER = (
    ("appends", "checkpoints", "makes folders", "links", "keeps a database", "keeps arrays", "caches at home",
     "logs to TensorBoard", "logs to W&B", "loads with workers"),
    ("changes rights", "touches", "renames data", "empties a folder", "overwrites itself", "configures at home"),
    ("writes by a shell", "commits", "leaves a process"),
    ("removes data", "cleans"),
)  # fmt: skip
"""Which of them one script does: nothing that undoes what another of them did, or keeps it from doing it."""
OWN_PROCESS = ("overwrites itself", "configures at home")
"""A process of its own for each run takes long to begin: a few say whether it is as safe."""

WRITING = """
    import os, pathlib, shutil, sqlite3, subprocess
    import numpy, torch
    from torch import nn

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            open(f"row-{{index}}", "w").write("x")
            return torch.zeros(1)

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 4)
    for step in range(40):
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        if step == 5:
            {acts}
    """


def state(folder):
    """Names, contents, rights and times of everything in a folder, also of what Git keeps."""
    out = hashlib.sha256()
    for path in sorted([folder, *folder.rglob("*")]):
        seen = path.lstat()
        out.update(f"{path} {seen.st_mtime_ns} {seen.st_mode}".encode())
        out.update(path.read_bytes() if path.is_file() and not path.is_symlink() else b"")
    return out.hexdigest()


@pytest.mark.parametrize("fresh", [False, True])
def test_whatever_a_script_does_to_its_files_they_are_as_before(tmp_path, monkeypatch, fresh):
    """Its folder with what Git keeps of it, and the home folder, are the same to the bit after runs of each script."""
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    (project / "old").mkdir(parents=True)
    (project / "old" / "best.pt").write_bytes(b"best")
    (project / "data.bin").write_bytes(b"data")
    assert sorted(name for names in TOGETHER for name in names) == sorted(WRITERS)
    scripts = [OWN_PROCESS] if fresh else TOGETHER
    for number, names in enumerate(scripts):
        acts = ("\n" + 12 * " ").join(WRITERS[name] for name in names)
        (project / f"train{number}.py").write_text(textwrap.dedent(WRITING.format(acts=acts)), encoding="utf-8")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=project, check=True, env={**os.environ, "HOME": str(home)})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    before = state(home), state(project)
    for number, names in enumerate(scripts):
        with Laboratory(Target(Path(f"train{number}.py")), jobs=1, fresh=fresh) as laboratory:
            survey = laboratory.look(steps=20)
            assert not survey.error, names
            laboratory.examine(survey.trainings[0])
            ((_, result),) = laboratory.run(deque([Request((), 0, 20)]))
            assert (result.error, len(result.losses)) == ("", 28), names
        assert (state(home), state(project)) == before, names
