import io
import logging
import re
import sys

from vit_jax.train import progress
from vit_jax.train.progress import Display, TrainingClock, duration_text, estimate_text

METRICS = {"train_loss": 1.25, "learning_rate": 1e-3, "images_per_second": 1234.0}


def test_the_clock_leaves_out_pauses_and_what_was_done_before(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])
    clock = TrainingClock(10, lambda step: 8 * step, lambda step: 40.0 * step, peak_flops=1000.0)
    time[0] += 2
    with clock.pause():
        time[0] += 50
    time[0] += 2
    assert clock.seconds == 4
    rates = clock.rates(20)
    assert rates["images_per_second"] == 10 * 8 / 4
    assert rates["mfu"] == 20 * 5.0 / 1000.0
    assert rates["exaflops"] == 20 * 8 * 5.0 / 1e18  # of all steps
    assert clock.seconds_left(20, 40) == 8
    assert "mfu" not in TrainingClock(0, lambda step: 8 * step, lambda step: 40.0 * step, None).rates(
        1
    )  # of a chip that is not known


def test_waiting_for_input_counts_where_the_devices_have_no_work(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: time[0])

    def batches():
        for seconds in (1, 5, 3):
            time[0] += seconds
            yield seconds

    clock, source = TrainingClock(0, lambda step: 8 * step, lambda step: 40.0 * step, None), batches()
    found = [clock.next_batch(source, lambda is_busy=is_busy: is_busy) for is_busy in (True, False, True)]
    time[0] += 1
    assert found == [1, 5, 3]
    assert clock.rates(3)["input_wait_fraction"] == 5 / 10


def test_plain_lines_where_there_is_no_terminal(capsys):
    Display(100, 0, enabled=False).say("other processes are silent")
    display = Display(100, 0, enabled=True)
    display.advance()
    display.show(10, METRICS | {"mfu": 0.5}, seconds_left=75)
    display.show(11, METRICS | {"input_wait_fraction": 0.004}, seconds_left=75)
    display.show(12, METRICS | {"input_wait_fraction": 0.124}, seconds_left=75)
    display.show(13, METRICS, seconds_left=75, seconds_to_end=3600)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step     10/100  loss 1.2500  lr 1.00e-03  1,234 images/s  MFU 50.0%  1m 15s left"
    assert lines[1].endswith("1,234 images/s  1m 15s left")
    assert lines[2].endswith("1,234 images/s  waiting for input 12%  1m 15s left")
    assert lines[3].endswith("1m 15s left, about 1h 00m to the end of all runs")
    assert [duration_text(seconds) for seconds in (0.4, 3600, 7270)] == ["0s", "1h 00m", "2h 01m"]


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    display = Display(100, 40, enabled=True)
    display.advance()
    display.show(41, METRICS, seconds_left=75)
    display.say("a line")
    logging.getLogger("vit_jax.data").warning("a warning")
    display.close()
    text = terminal.getvalue()
    assert re.search(r"(^|[\r\n])a warning\n", text), "on a line of its own"
    assert "41/100" in text
    assert "loss 1.2500" in text
    assert "a line\n" in text


def test_the_estimate_names_probe_for_long_runs_on_a_cpu():
    assert estimate_text(59, "cpu") == ""
    assert estimate_text(3600, "cpu").startswith("estimate: 1h 00m of training")
    assert "probe" not in estimate_text(3600, "cpu") + estimate_text(50_640, "tpu")
    assert "14h 04m" in estimate_text(50_640, "cpu")
    assert "vit-jax probe" in estimate_text(50_640, "cpu")
