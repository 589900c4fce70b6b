// Package accel decides what executes guests on this host: the processor (KVM) or emulation (TCG).
//
// That /dev/kvm exists and opens proves nothing: nested, or on a host whose KVM only runs paravirtual guests (PVM), a
// stock kernel may never get out of early boot. So KVM is tried with the real guest, once per boot of the host, and the
// verdict is kept.
package accel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/flock"
)

// Kind is what executes the guest's code.
type Kind string

// The accelerators, by QEMU's names.
const (
	KVM Kind = "kvm" // the processor
	TCG Kind = "tcg" // emulation
)

// trialTimeout is how long a guest under KVM may take to answer. It takes one second; one that hangs takes for ever.
const trialTimeout = 10 * time.Second

// Verdict is what executes guests here, and why.
type Verdict struct {
	Kind   Kind   `json:"kind"`
	Reason string `json:"reason"`
}

// ErrUndecided says that the trial has not been made yet.
var ErrUndecided = errors.New("KVM has not been tried yet")

// kept is the verdict on disk, with what it depends on.
type kept struct {
	Verdict
	BootID  string `json:"boot_id"` // of the host
	Subject string `json:"subject"` // what was booted
}

// Judge finds verdicts. Its fields are for tests: the files of the host.
type Judge struct {
	setting string
	scale   func(time.Duration) time.Duration
	file    string // where the verdict is kept
	log     *slog.Logger

	device, pvm, cpuinfo, bootID string
}

// NewJudge returns the judge of this host.
func NewJudge(cfg *config.Config, log *slog.Logger) *Judge {
	return &Judge{
		setting: cfg.VM.Accelerator,
		scale:   cfg.Timeout,
		file:    filepath.Join(cfg.StateDir, "accelerator.json"),
		log:     log,
		device:  "/dev/kvm",
		pvm:     "/sys/module/kvm_pvm",
		cpuinfo: "/proc/cpuinfo",
		bootID:  "/proc/sys/kernel/random/boot_id",
	}
}

// Known returns the verdict as far as it can be had without a trial, otherwise ErrUndecided. subject names what would be
// booted: the digests of QEMU and of the guest image.
func (j *Judge) Known(subject string) (Verdict, error) {
	switch j.setting {
	case "tcg":
		return Verdict{TCG, "configured (vm.accelerator)"}, nil
	case "kvm":
		if why := j.unusable(); why != "" {
			return Verdict{}, fmt.Errorf("vm.accelerator is kvm, but %s; set it to auto or tcg", why)
		}
		return Verdict{KVM, "configured (vm.accelerator)"}, nil
	}
	if why := j.unusable(); why != "" {
		return Verdict{TCG, why}, nil
	}
	k, err := j.read()
	if err != nil {
		return Verdict{}, err
	}
	boot, err := j.thisBoot()
	if err != nil {
		return Verdict{}, err
	}
	if k.Kind == "" || k.BootID != boot || k.Subject != subject {
		return Verdict{}, ErrUndecided
	}
	return k.Verdict, nil
}

// Decide returns the verdict, after a trial if need be: trial boots the real guest under KVM and returns nil when it has
// answered. A trial that fails, or takes too long, is a verdict; one that ctx cuts short is not.
func (j *Judge) Decide(ctx context.Context, subject string, trial func(context.Context) error) (Verdict, error) {
	v, err := j.Known(subject)
	if !errors.Is(err, ErrUndecided) {
		return v, err
	}
	unlock, err := flock.Lock(ctx, j.file+".lock")
	if err != nil {
		return Verdict{}, fmt.Errorf("decide on the accelerator: %w", err)
	}
	defer unlock()
	if v, err := j.Known(subject); !errors.Is(err, ErrUndecided) { // somebody else's trial
		return v, err
	}
	limit := j.scale(trialTimeout)
	tctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	err = trial(tctx)
	switch {
	case ctx.Err() != nil:
		return Verdict{}, fmt.Errorf("decide on the accelerator: %w", ctx.Err())
	case err == nil:
		v = Verdict{KVM, fmt.Sprintf("a guest answered in %.1f s", time.Since(start).Seconds())}
	case tctx.Err() != nil:
		v = Verdict{TCG, fmt.Sprintf("under KVM the guest did not come up within %s", limit)}
	default:
		v = Verdict{TCG, "under KVM the guest did not come up: " + oneLine(err)}
	}
	if v.Kind == TCG {
		j.log.Warn("KVM doesn't run a guest here; guests are emulated, which is slow", "reason", v.Reason)
	}
	return v, j.keep(v, subject)
}

// unusable says why a trial isn't worth making, "" if it is.
func (j *Judge) unusable() string {
	f, err := os.OpenFile(j.device, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "there is no " + j.device
	case err != nil:
		return fmt.Sprintf("%s can't be opened: %v", j.device, errors.Unwrap(err))
	}
	_ = f.Close()
	if _, err := os.Stat(j.pvm); err == nil && !j.hardware() {
		return "KVM has no hardware virtualisation here, only PVM, which does not run stock kernels"
	}
	return ""
}

var virtualisation = regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`)

func (j *Judge) hardware() bool {
	b, err := os.ReadFile(j.cpuinfo)
	return err == nil && virtualisation.Match(b)
}

func (j *Judge) thisBoot() (string, error) {
	b, err := os.ReadFile(j.bootID)
	return strings.TrimSpace(string(b)), err
}

// read returns what is kept; nothing, or nothing that can be read, is the zero value.
func (j *Judge) read() (kept, error) {
	var k kept
	b, err := os.ReadFile(j.file)
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil
	}
	if err != nil {
		return k, fmt.Errorf("read the accelerator's verdict: %w", err)
	}
	if json.Unmarshal(b, &k) != nil || k.Kind != KVM && k.Kind != TCG {
		return kept{}, nil
	}
	return k, nil
}

func (j *Judge) keep(v Verdict, subject string) error {
	boot, err := j.thisBoot()
	if err != nil {
		return err
	}
	b, err := json.Marshal(kept{v, boot, subject})
	if err != nil {
		return err
	}
	tmp := j.file + ".tmp" // under the lock
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("keep the accelerator's verdict: %w", err)
	}
	return os.Rename(tmp, j.file)
}

func oneLine(err error) string {
	s := strings.Join(strings.Fields(err.Error()), " ")
	if len(s) > 300 {
		s = strings.ToValidUTF8(s[:300], "") + "…"
	}
	return s
}
