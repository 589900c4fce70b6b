package agent

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/cubesandbox/cube/guest-agent/api"
)

// saved is what is left of a machine: its devices, its memory, its disks.
type saved struct {
	dir   string
	disks []plugged
	lun   int
}

// memoryFile is where a machine that can be saved has its memory.
func memoryFile(dir string) string { return filepath.Join(dir, "memory") }

func memoryOption(dir, share string) []string {
	return []string{"-object", "memory-backend-file,id=mem,size=" + memory + ",mem-path=" + memoryFile(dir) + ",share=" + share}
}

// freeze brings the work in the machine to rest, and its channel.
func (m *machine) freeze(t *testing.T) {
	t.Helper()
	watch := m.stopwatch(t)
	m.freezes++
	if _, err := m.agent.Freeze(contextFor(t, 10*time.Second), &api.FreezeRequest{Number: m.freezes}); err != nil {
		t.Fatal(err)
	}
	watch.log("freeze")
	if err := m.session.Hold(contextFor(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	watch.log("freeze and hold")
}

func (m *machine) thaw(t *testing.T) {
	t.Helper()
	m.session.Release()
	r := &api.ThawRequest{Number: m.freezes, UnixNanos: time.Now().UnixNano()}
	if _, err := m.agent.Thaw(contextFor(t, 10*time.Second), r); err != nil {
		t.Fatal(err)
	}
}

// stop has the machine stand still and writes the state of its devices to a file.
func (m *machine) stop(t *testing.T, state string) {
	t.Helper()
	ctx := contextFor(t, 10*time.Second)
	m.do(ctx, t, "stop", map[string]any{})
	m.do(ctx, t, "xen-save-devices-state", map[string]any{"filename": state, "live": false})
}

// cont has it go on.
func (m *machine) cont(t *testing.T) {
	t.Helper()
	m.do(contextFor(t, 10*time.Second), t, "cont", map[string]any{})
}

// save writes a machine that is at rest, whose memory is a file in dir, to files. It stands still afterwards.
func (m *machine) save(t *testing.T, dir string) *saved {
	t.Helper()
	s := &saved{dir: t.TempDir(), lun: m.lun}
	ctx := contextFor(t, 60*time.Second)
	m.stop(t, s.state())
	s.copy(ctx, t, memoryFile(dir), memoryFile(s.dir))
	for _, d := range m.disks {
		to := filepath.Join(s.dir, d.serial)
		s.copy(ctx, t, d.image, to)
		s.disks = append(s.disks, plugged{serial: d.serial, image: to, lun: d.lun})
	}
	return s
}

func (s *saved) state() string { return filepath.Join(s.dir, "state") }

func (s *saved) copy(ctx context.Context, t *testing.T, from, to string) {
	t.Helper()
	if out, err := exec.CommandContext(ctx, "cp", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// restore starts a machine that is what was saved, and begins a session. It has no identity yet. A saved machine can be
// restored once: its disks are in use then.
func (s *saved) restore(t *testing.T) *machine {
	t.Helper()
	options := append(memoryOption(s.dir, "off"), "-global", "migration.send-configuration=off", "-incoming", "exec:cat "+s.state())
	for _, d := range s.disks {
		options = append(options,
			"-blockdev", fmt.Sprintf(`{"driver":"raw","node-name":%q,"file":{"driver":"file","filename":%q}}`, d.serial, d.image),
			"-device", fmt.Sprintf("scsi-hd,id=disk-%s,drive=%[1]s,bus=scsi0.0,lun=%d,serial=%[1]s", d.serial, d.lun))
	}
	m := launch(t, options)
	t.Cleanup(m.end)
	m.disks, m.lun = s.disks, s.lun
	return m
}

// attach gives a process of a restored machine streams of the new session.
func (m *machine) attach(t *testing.T, id, exec string, goesOn bool) (in io.WriteCloser, out io.Reader) {
	t.Helper()
	stdin, stdout, _, names := m.streams(t)
	if _, err := m.agent.AttachProcess(contextFor(t, 10*time.Second), &api.AttachProcessRequest{Id: id, ExecId: exec, Stdio: names, GoesOn: goesOn}); err != nil {
		t.Fatal(err)
	}
	return stdin, stdout
}

// sequence is a program that counts aloud as fast as it can.
const sequence = "seq -w 1 100000000"

// A machine that is saved under load goes on as if nothing had been, and each of its clones from there, with an identity
// of its own.
func TestSave(t *testing.T) {
	dir := t.TempDir()
	m := boot(t, memoryOption(dir, "on")...)
	defer m.end()
	loud, clock, still := m.newContainer(t, "loud"), m.newContainer(t, "clock"), m.newContainer(t, "still")
	for _, c := range []*container{loud, clock, still} {
		c.keep = true // the machine is ended with them
	}
	loud.run(t, containerSpec("sh", "-c", sequence))
	_, _, _, err := loud.exec(t, "echo", process("sh", "-c", "while read x; do echo \"got $x\"; done; exit 5"))
	if err != nil {
		t.Fatal(err)
	}
	clock.run(t, containerSpec("sh", "-c", `while :; do echo "$(date +%s) $(head -c 16 /dev/urandom | sha256sum)"; sleep 0.3; done`))
	still.run(t, containerSpec("sh", "-c", counter))
	counted(t, still.stdout)
	if err := still.pause(t); err != nil {
		t.Fatal(err)
	}
	follow := newSequence(loud.stdout)
	follow.read(t, 50_000)

	// While the machine is saved its clock is wrong.
	if _, err := m.agent.SetTime(contextFor(t, 10*time.Second), &api.SetTimeRequest{UnixNanos: time.Now().Add(-10 * time.Minute).UnixNano()}); err != nil {
		t.Fatal(err)
	}
	m.freeze(t)
	used := m.work(t)
	template := []*saved{m.save(t, dir), m.save(t, dir)}
	m.cont(t)
	t.Logf("CPU while at rest: %v", m.work(t)-used)
	m.thaw(t)
	// What was written before the save, and what was in the making then, is earlier than this.
	for began := time.Now().Add(-time.Second); saidTime(t, counted(t, clock.stdout)).Before(began); {
	}
	stops, each := 3, 50_000
	if os.Getenv("CUBE_TEST_LONG") != "" {
		stops, each = 10, 200_000 // 20 MB
	}
	for range stops {
		m.freeze(t)
		m.stop(t, filepath.Join(dir, "state"))
		m.cont(t)
		m.thaw(t)
		follow.read(t, follow.next+each)
	}

	m.freeze(t)
	last := m.save(t, dir)
	m.end()
	follow.readRest(t)

	var lines []string
	for _, s := range template {
		clone := s.restore(t)
		lines = append(lines, checkClone(t, clone))
		clone.end()
	}
	if lines[0] == lines[1] {
		t.Errorf("both clones have said %q", lines[0])
	}
	resumed := last.restore(t)
	resumed.configure(t)
	_, out := resumed.attach(t, "loud", "", true)
	resumed.thaw(t)
	follow.from(out)
	follow.read(t, follow.next+each)
}

// checkClone wakes a clone and returns what its clock and its random numbers say first.
func checkClone(t *testing.T, m *machine) string {
	t.Helper()
	_, err := m.agent.Thaw(contextFor(t, 10*time.Second), &api.ThawRequest{UnixNanos: time.Now().UnixNano()})
	want(t, err, codes.FailedPrecondition, "identity")
	m.configure(t)
	f := m.events(t)
	_, out := m.attach(t, "clock", "", false)
	in, echoed := m.attach(t, "loud", "echo", false)
	_, err = m.agent.AttachProcess(contextFor(t, 10*time.Second), &api.AttachProcessRequest{Id: "loud", Stdio: &api.Stdio{Terminal: true}})
	want(t, err, codes.InvalidArgument, "terminal")
	_, err = m.agent.AttachProcess(contextFor(t, 10*time.Second), &api.AttachProcessRequest{Id: "loud", ExecId: "none"})
	want(t, err, codes.NotFound, "none")
	m.thaw(t)
	counted(t, out) // it may have been in the making
	line := counted(t, out)
	if off := time.Since(saidTime(t, line)); off.Abs() > 30*time.Second {
		t.Errorf("%q is off by %v", line, off)
	}
	if _, err := io.WriteString(in, "this\n"); err != nil {
		t.Fatal(err)
	}
	if got := counted(t, echoed); got != "got this" {
		t.Errorf("the exec has said %q", got)
	}
	_ = in.(interface{ CloseWrite() error }).CloseWrite()
	if status := f.exit(t, "loud", "echo"); status != 5 {
		t.Errorf("status %d", status)
	}
	still := &container{m: m, id: "still"}
	if _, err := m.agent.ExecProcess(contextFor(t, 10*time.Second), &api.ExecProcessRequest{Id: "still", ExecId: "e"}); err == nil {
		t.Error("what was paused runs")
	} else {
		want(t, err, codes.FailedPrecondition, "paused")
	}
	if err := still.resume(t); err != nil {
		t.Error(err)
	}
	if err := m.signal(t, &api.SignalProcessRequest{Id: "still", Signal: 9}); err != nil {
		t.Error(err)
	}
	if status := f.exit(t, "still", ""); status != 137 {
		t.Errorf("status %d", status)
	}
	return line
}
