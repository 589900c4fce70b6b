package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cavaliergopher/cpio"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/internal/tsc"
	"github.com/cubesandbox/cube/vmm/guestimage"
)

// module is the path of the tree's packages.
const module = "github.com/cubesandbox/cube/"

// suite is a package whose tests are run in the guest.
type suite struct {
	pkg string
	run string // go test's -run
}

func (s suite) binary() string { return "/tests/" + filepath.Base(s.pkg) + ".test" }

// run boots the installed guest kernel with suites for its only work, and returns what was on the console when it has ended.
func run(t *testing.T, cfg *config.Config, limit time.Duration, suites []suite) string {
	t.Helper()
	dir := t.TempDir()
	initrd := filepath.Join(dir, "initrd.img")
	must(t, writeInitramfs(t, initrd, filepath.Join(cfg.GuestDir(), guestimage.Initramfs), archive(t, dir, suites)))
	khz, err := tsc.KHz()
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), cfg.Timeout(limit))
	defer cancel()
	qemu := func(path string) string { return filepath.Join(cfg.QEMUDir(), path) }
	guest := func(name string) string { return filepath.Join(cfg.GuestDir(), name) }
	disk := fmt.Sprintf(`{"driver":"raw","node-name":"modules","read-only":true,"file":{"driver":"file","filename":%q}}`, guest(guestimage.Modules))
	cmd := exec.CommandContext(ctx, qemu("lib64/ld-linux-x86-64.so.2"),
		"--library-path", qemu("lib/x86_64-linux-gnu")+":"+qemu("usr/lib/x86_64-linux-gnu"), qemu("usr/bin/qemu-system-x86_64"),
		"-L", qemu("usr/share/qemu"), "-L", qemu("usr/share/seabios"),
		"-M", "microvm", "-accel", "tcg,tb-size=64", "-cpu", "max", "-smp", "2", "-m", "512", "-nodefaults", "-no-user-config",
		"-display", "none", "-no-reboot", "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-kernel", guest(guestimage.Kernel), "-initrd", initrd,
		// The second processor has no tick while one thing runs on it: kernels for that have no membarrier(2).
		"-append", "console=ttyS0 quiet tsc=reliable panic=-1 reboot=t mitigations=off nohz_full=1 tsc_early_khz="+strconv.Itoa(khz),
		// The boot sets up the card that a machine has.
		"-device", "virtio-net-device",
		"-device", "virtio-scsi-device,id=scsi0", "-blockdev", disk,
		"-device", "scsi-hd,drive=modules,bus=scsi0.0,lun=0,serial=modules")
	cmd.Env = []string{"QEMU_MODULE_DIR=" + qemu("usr/lib/x86_64-linux-gnu/qemu")}
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	console := strings.ReplaceAll(string(out), "\r\n", "\n")
	if err != nil {
		t.Fatalf("the guest didn't end by itself: %v; its console:\n%s", errors.Join(err, ctx.Err()), console)
	}
	return console
}

// archive is what the guest has besides the installed initramfs: an init, the tests and their plan. A name twice is the last.
func archive(t *testing.T, dir string, suites []suite) map[string]string {
	t.Helper()
	files := map[string]string{"init": build(t, dir, "init", "build", module+"integration/kernel/init")}
	var plan bytes.Buffer
	for _, s := range suites {
		files[s.binary()[1:]] = build(t, dir, filepath.Base(s.pkg), "test", "-c", module+s.pkg)
		fmt.Fprintf(&plan, "%s -test.v -test.run=%s\n", s.binary(), s.run)
	}
	files["tests/plan"] = filepath.Join(dir, "plan")
	must(t, os.WriteFile(files["tests/plan"], plan.Bytes(), 0o600))
	return files
}

// build makes a static binary.
func build(t *testing.T, dir, name string, goArgs ...string) string {
	t.Helper()
	out := filepath.Join(dir, name)
	pkg := goArgs[len(goArgs)-1]
	args := append(goArgs[:len(goArgs)-1:len(goArgs)-1], "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", out, pkg)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v: %s", pkg, err, said)
	}
	return out
}

// writeInitramfs appends files, by their names in the guest, to an initramfs.
func writeInitramfs(t *testing.T, path, base string, files map[string]string) error {
	t.Helper()
	out, err := os.Create(path)
	must(t, err)
	defer out.Close()
	in, err := os.Open(base)
	must(t, err)
	defer in.Close()
	if _, err := io.Copy(out, in); err != nil {
		return err
	}
	w := cpio.NewWriter(out)
	if err := w.WriteHeader(&cpio.Header{Name: "tests", Mode: cpio.TypeDir | 0o755}); err != nil {
		return err
	}
	for name, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := w.WriteHeader(&cpio.Header{Name: name, Mode: cpio.TypeReg | 0o755, Size: int64(len(b))}); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), out.Close())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
