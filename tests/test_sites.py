"""The profiles of the sites are complete, and a real Slurm controller that models the site accepts their jobs."""

import json
import re
import shutil
import subprocess
import tomllib

import psutil
import pytest
import yaml

import runs
from needs import missing, require
from site_models import table
from workshop.errors import UserError
from workshop.slurm import ondemand
from workshop.slurm.model import PROGRAMS, model
from workshop.slurm.request import seconds
from workshop.slurm.sites import SITES, OnDemand, Queue, Site, detect_site, find_site, known_sites, read_site
from workshop.slurm.sites import Environment as SiteEnvironment
from workshop.slurm.submission import settings_text, submission

LIVE = [name for name in known_sites() if find_site(name).status == "live"]
TEMPLATE = SITES / "template.toml"


# ---------------------------------------------------------------- profiles


def test_the_list_of_known_sites_is_complete():
    expected = "adroit casper della derecho hipergator local lumi mahti marenostrum5 puhti roihu"
    assert " ".join(known_sites()) == expected
    assert [name for name in known_sites() if name not in LIVE] == ["mahti", "puhti"]


@pytest.mark.parametrize("name", known_sites())
def test_the_values_of_a_profile_are_consistent(name):
    site = find_site(name)
    assert site.cores_per_gpu * site.gpus_per_node <= site.usable_cores_per_node
    assert site.launcher == {"slurm": "srun", "pbs": "mpiexec"}[site.scheduler]
    assert (site.memory == "none") == (site.memory_per_gpu == 0)
    assert (site.environment.python == "") == (site.environment.kind == "venv")
    assert not {option.partition("=")[0] for option in site.options} & set(site.forbidden)
    if site.scheduler == "pbs":
        assert not any(queue.partition or queue.qos for queue in site.queues)
    for queue in site.queues:
        assert not queue.time or seconds(queue.time) >= 600  # our job scripts request ten minutes
    if site.internet is not True and name != "local":
        assert site.offline or site.status == "retired"


def uncommented() -> str:
    """Return the template with its optional keys, without the comment signs."""
    return re.sub(r'^# (?=\[\w+\]|[\w"-]+ = )', "", TEMPLATE.read_text(), flags=re.MULTILINE)


def test_the_template_names_and_explains_every_key(tmp_path):
    read_site(TEMPLATE)
    full = tmp_path / "full.toml"
    full.write_text(uncommented())
    read_site(full)
    tables = tomllib.loads(uncommented())
    assert set(tables) == set(Site.model_fields)
    assert set(tables["environment"]) == set(SiteEnvironment.model_fields)
    assert set(tables["ondemand"]) == set(OnDemand.model_fields)
    for key in Queue.model_fields:
        assert re.search(rf"^#   {key} +\S", TEMPLATE.read_text(), re.MULTILINE), key
    for key in {**Site.model_fields, **SiteEnvironment.model_fields}:
        line = re.search(rf"^(?:# )?(?:{key} = |\[{key}\]).*", TEMPLATE.read_text(), re.MULTILINE)[0]
        assert key in ("queues", "environment", "gpus_per_node") or "#" in line[2:], line


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gpus_per_node = 4\n", "", "new.toml: gpus_per_node is missing"),
        ("gpus_per_node = 4\n", "gpus_per_node = 4\ngpus = 4\n", "new.toml: gpus is not a key of a profile"),
        (
            "gpus_per_node = 4\n",
            'gpus_per_node = "4"\n',
            "new.toml: gpus_per_node is wrong: Input should be a valid integer",
        ),
        ('time = "00:15:00", max_nodes', 'time = "00:15:00", nodes', "new.toml: queues.0.nodes is not a key"),
        (
            'kind = "module"',
            'kind = "modul"',
            "new.toml: environment.kind is wrong: Input should be 'module', 'container'",
        ),
        ('gpu_option = "--gpus-per-node=%d"', 'gpu_option = "--gpus-per-node=4"', "new.toml: gpu_option is wrong"),
        ('uncertain = ["internet"]', 'uncertain = ["intranet"]', "new.toml: uncertain names intranet"),
        ("name = ", "name ", "new.toml is not TOML"),
    ],
)
def test_a_mistake_in_a_profile_is_reported_in_one_sentence(old, new, words, tmp_path):
    text = TEMPLATE.read_text()
    assert old in text
    (tmp_path / "new.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as mistake:
        read_site(tmp_path / "new.toml")
    assert str(mistake.value).startswith(words)
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("roihu-gpu2", "roihu"),
        ("roihu-cpu1", ""),  # an x86 login node, from which jobs do not fit the Arm nodes
        ("uan03", "lumi"),
        ("derecho6", "derecho"),
        ("casper-login1", "casper"),
        ("alogin1", "marenostrum5"),
        ("login5.ufhpc", "hipergator"),
        ("della-gpu", "della"),
        ("adroit5", "adroit"),
        ("puhti-login11", "puhti"),
        ("laptop", ""),
    ],
)
def test_a_site_is_recognized_by_its_host_names(host, name):
    assert detect_site(host) == name


@pytest.mark.parametrize("name", LIVE)
def test_a_job_script_can_source_its_settings(name, tmp_path):
    """A script that stops at errors sources the settings, with stand-ins for the commands of the site, and gets its values."""
    site = find_site(name)
    data = "/data with 'quotes'"
    settings = tmp_path / "site.sh"
    settings.write_text(settings_text(name, site, {"WORKSHOP_IMAGE": "/images/torch.sif", "WORKSHOP_DATA": data}))
    script = (
        'module() { [ -n "$UNSET_BY_MODULES" ] || false; }; conda() { false; }\n'
        "srun() { :; }; mkdir() { :; }\n"
        f"set -euo pipefail; source {settings}\n"
        "[[ $- == *e* && $- == *u* ]] && exec env"
    )
    job = {"USER": "me", "SLURM_JOB_ACCOUNT": "project_1", "SLURM_NNODES": "2", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=job, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert values["PYTHONPATH"] == str(runs.ROOT)
    assert values["WORKSHOP_DATA"] == data
    expected = {**site.network, **site.offline, **site.caches}
    expected = {
        key: value.replace("$USER", "me").replace("$SLURM_JOB_ACCOUNT", "project_1") for key, value in expected.items()
    }
    assert expected.items() <= values.items()
    if site.environment.kind == "venv":
        assert shutil.which(values["PYTHON"], path=values["PATH"])
    else:
        assert values["PYTHON"] == site.environment.python.replace("$WORKSHOP_IMAGE", "/images/torch.sif")
    if not missing("shellcheck"):
        done = subprocess.run(["shellcheck", "--norc", settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def models():
    """A running model of each site."""
    require(*PROGRAMS)
    managers = {site: model(table.MODELS / f"{site}.conf") for site in table.SITES}
    running = {}
    try:
        for site, manager in managers.items():
            running[site] = manager.__enter__()
        yield running
    finally:
        for site in running:
            managers[site].__exit__(None, None, None)


def named(variant) -> str:
    return f"{variant.site}: {variant.title}"


@pytest.mark.parametrize("variant", table.RIGHT, ids=named)
def test_the_site_accepts(variant, models, tmp_path):
    accepted, words = table.ask_model(models[variant.site], variant, tmp_path)
    assert accepted, words


@pytest.mark.parametrize("variant", table.WRONG, ids=named)
def test_the_site_refuses(variant, models, tmp_path):
    accepted, words = table.ask_model(models[variant.site], variant, tmp_path)
    assert not accepted, words
    assert words


@pytest.mark.parametrize("variant", [variant for variant in table.WRONG if variant.asked is not None], ids=named)
def test_submit_refuses_before_the_site_does(variant, tmp_path):
    words = table.ask_submit(variant, tmp_path)
    assert words
    assert "\n" not in words


@pytest.mark.parametrize("site", table.SITES)
@pytest.mark.parametrize("asks", ["--gpus-per-node=2", "--gpus-per-node=v100:2", "--gres=gpu:2", "--gres=gpu:v100:2"])
def test_a_job_gets_exactly_the_gpus_that_it_requests(site, asks, models, tmp_path):
    """For any form of request in the script, the job has one request, with the GPU type and the cores per GPU of the site."""
    path = table.script(tmp_path)
    path.write_text(path.read_text().replace("--gpus-per-node=4", asks))
    profile = find_site(site)
    command = submission(path, site, profile, account="project_1", environment={"WORKSHOP_IMAGE": "x"}).command
    request = models[site].request(command)
    kind = {"roihu": "gh200:", "hipergator": "b200:"}.get(site, "")
    assert request["TresPerNode"].replace("/", ":") == f"gres:gpu:{kind}2", "the request for GPUs is wrong"
    assert request["CPUs/Task"] == str(2 * profile.cores_per_gpu)
    assert request["NumNodes"] in ("2", "2-2")
    assert request["WorkDir"] == str(runs.Path.cwd())


def test_slurm_does_not_replace_one_kind_of_gpu_request_by_the_other(models, tmp_path):
    """--gres on the line does not replace --gpus-per-node in the script, so ``submit`` repeats the option of the script."""
    command = table.changed(table.build("lumi", tmp_path).command, {"--gpus-per-node": None, "--gres": "gpu:2"})
    try:
        kept = models["lumi"].request(command)["TresPerNode"].replace("/", ":")
    except UserError as error:  # Slurm 26.05 accepts only one of the two
        kept = str(error)
    assert kept in ("gres:gpu:4,gres:gpu:2", "sbatch: fatal: --gpus-per-node and --gres=gpu are mutually exclusive.")


SCRIPTS = sorted(path for folder in ("", "solutions") for path in (runs.ROOT / folder / "slurm-multinode").glob("*.sh"))


@pytest.mark.parametrize("site", table.SITES)
def test_the_site_accepts_every_job_script(site, models):
    scripts = [path for path in SCRIPTS if "#SBATCH" in path.read_text()]
    assert len(scripts) >= 4
    for path in scripts:
        job = submission(path, site, find_site(site), account="project_1", environment={"WORKSHOP_IMAGE": "x"})
        accepted, words = models[site].test(job.command)
        assert accepted, f"{path.name}: {words}"
        assert job.sources_site, path.name
        assert f"--chdir={runs.ROOT / 'slurm-multinode'}" in job.command


def test_a_model_of_a_site_leaves_no_process(tmp_path, models):
    """Start two more models beside those of the other tests; one of them ends with an error."""

    class Trouble(Exception):
        pass

    def left(folder) -> list:
        return [
            each for each in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(each.info["cmdline"] or [])
        ]

    def fail_beside(first) -> None:
        with model(table.MODELS / "roihu.conf") as second:
            folders.extend(runs.Path(each.environment["SLURM_CONF"]).parent for each in (first, second))
            assert [len(left(folder)) for folder in folders] == [2, 2]
            raise Trouble

    folders = []
    with model(table.MODELS / "lumi.conf") as first:
        with pytest.raises(Trouble):
            fail_beside(first)
        assert first.run(["scontrol", "ping"]).returncode == 0
        assert not folders[1].exists()
        assert left(folders[1]) == []
    assert not folders[0].exists()
    assert left(folders[0]) == []


def test_a_model_that_cannot_start_says_why(models, tmp_path):
    (tmp_path / "broken.conf").write_text("NodeName=n[1-2] CPUs=many\n")
    with pytest.raises(UserError, match=r"^slurmctld does not start: .*CPUs"), model(tmp_path / "broken.conf"):
        pass


# ---------------------------------------------------------------- Open OnDemand


@pytest.mark.parametrize("name", [name for name in LIVE if find_site(name).ondemand])
def test_the_settings_of_the_app_come_from_the_profile(name):
    template = (runs.ROOT / "ondemand" / "settings.yml").read_text()
    text = ondemand.settings(find_site(name), "project_1")
    settings = yaml.safe_load(text)
    assert list(settings) == list(yaml.safe_load(template))
    assert re.findall(r"#.*", text) == re.findall(r"#.*", template)
    assert settings["scheduler"] == find_site(name).scheduler
    assert settings["account"] == "project_1"
    if settings["scheduler"] == "slurm":
        assert settings["gpu_option"] == find_site(name).gpu_option
    assert settings["options"] == (["--qos=project_1"] if name == "hipergator" else [])


@pytest.mark.parametrize("name", ["roihu", "lumi"])
def test_the_files_of_a_course_for_open_ondemand_are_written(name, tmp_path):
    command = [
        "-m",
        "workshop.slurm.ondemand",
        name,
        tmp_path,
        "--account",
        "project_1",
        "--repository",
        "https://x.org/w.git",
    ]
    done = runs.run([runs.sys.executable, *command], runs.ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "settings.yml").exists()
    folder = tmp_path / f"www_{name}_modules"
    module = (folder / "distributed-pytorch-workshop.lua").read_text()
    assert "Jupyter" in module  # the app searches for this word
    values = dict(re.findall(r'^setenv\("(\w+)", "([^"]*)"\)$', module, re.MULTILINE))
    assert values.keys() == {
        *("_COURSE_BASE_NAME", "_COURSE_NOTEBOOK", "_COURSE_GIT_REPO", "_COURSE_GIT_REF", "_COURSE_NOTEBOOK_TYPE"),
        "SBATCH_ACCOUNT",
    }
    assert (runs.ROOT / values["_COURSE_NOTEBOOK"]).is_file()
    assert values["_COURSE_GIT_REPO"] == "https://x.org/w.git"
    assert re.search(r'^prepend_path\("PATH", "/projappl/project_1/[\w/.-]+/bin"\)$', module, re.MULTILINE)
    resources = yaml.safe_load((folder / "distributed-pytorch-workshop-resources.yml").read_text())
    assert list(resources) == ["cores", "time", "partition", "local_disk", "mem", "reservation"]
    assert (resources["time"], resources["partition"]) == ("04:00:00", find_site(name).ondemand.partition)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["marenostrum5"], "has no Open OnDemand"),
        (["roihu"], "needs --account PROJECT and --repository URL"),
        (["roihu", "--account", 'x")', "--repository", "y"], "letters, digits"),
        (["nowhere"], "there is no site 'nowhere'"),
    ],
)
def test_a_mistake_writes_no_files_for_open_ondemand(arguments, words, tmp_path):
    done = runs.run(
        [runs.sys.executable, "-m", "workshop.slurm.ondemand", arguments[0], tmp_path, *arguments[1:]], runs.ROOT
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_app_uses_the_settings_of_a_site(tmp_path):
    """The app, rendered with Ruby as the dashboard does, requests the values of the profile."""
    require("ruby")
    app = shutil.copytree(runs.ROOT / "ondemand", tmp_path / "app")
    (app / "settings.yml").write_text(ondemand.settings(find_site("hipergator"), "group"))
    (tmp_path / "session").mkdir()
    asked = {"values": {"hours": "1", "gpus": "1", "reservation": ""}}
    command = ["ruby", runs.ROOT / "tests/ondemand/render.rb", app, tmp_path / "session", json.dumps(asked)]
    script = json.loads(runs.run(command, tmp_path).stdout)["submit"]["script"]
    assert script["accounting_id"] == "group"
    assert script["queue_name"] == "hpg-dev"
    assert script["native"][-2:] == ["--gres=gpu:b200:1", "--qos=group"]
