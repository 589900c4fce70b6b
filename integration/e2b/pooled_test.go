package e2b

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/events"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/typeurl/v2"

	"github.com/cubesandbox/cube/orchestrator/db"
	"github.com/cubesandbox/cube/orchestrator/machines"
)

// pooled is a client of a stack that keeps machines ready, who remembers all that he has had of it.
type pooled struct {
	*client
	of *pool
}

// pool is what is known of it from outside.
type pool struct {
	reserved float64 // bytes of memory, of others
	each     float64 // bytes that are reserved for a member
	base     string  // the id of that template

	mu   sync.Mutex
	used map[string]bool // ids of sandboxes, their machine ids, host names, tokens and random numbers
	seen map[string]bool // ids of members, whatever has become of them
}

// newPooled has the stack keep n machines of the template base, until the test ends, when nothing of them is left.
func newPooled(t *testing.T, n int) *pooled {
	t.Helper()
	c := newClient(t)
	before := footprint(t)
	p := &pooled{client: c, of: &pool{reserved: c.metric(memoryReserved, "memory"), used: map[string]bool{}, seen: map[string]bool{}}}
	restartWith(t, fmt.Sprintf("[pool]\nmax_memory = \"%dMiB\"\nmax_per_template = %d\n", (n+1)*512, n)) // and one of another template
	t.Cleanup(func() {
		restartWith(t, "")
		filled(t, 0)
		asBefore(t, before)
		if now := c.metric(memoryReserved, "memory"); now != p.of.reserved {
			t.Errorf("%.0f bytes are reserved, before it was %.0f", now, p.of.reserved)
		}
	})
	t.Cleanup(c.killAll)
	each(make([]struct{}, n), func(struct{}) { p.gets("to be many") }) // that is how many are wanted
	c.killAll()
	filled(t, n)
	p.of.each, p.of.base = c.metric("cube_admission_spare", "memory")/float64(n), members(t)[0].Build.Template
	return p
}

func (p *pooled) with(t *testing.T) *pooled {
	c := *p.client
	c.T = t
	return &pooled{client: &c, of: p.of}
}

// metric is what Prometheus is told of a name with a label's value, or without labels; 0 if it isn't told.
func (c *client) metric(name, label string) float64 {
	c.Helper()
	if label != "" {
		name += `\{[^}]*"` + label + `"[^}]*\}`
	}
	found := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(c.scrape())
	if found == nil {
		return 0
	}
	v, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		c.Error(err)
	}
	return v
}

// wanted is a create's body that says who wants it.
func wanted(template, who string) map[string]any {
	return map[string]any{"templateID": template, "timeout": 3600, "envVars": map[string]string{"WHO": who}, "metadata": map[string]string{"who": who}}
}

// gets creates a sandbox, as one does who tries again when he is told to, and sees that it is his own.
func (p *pooled) gets(who string) (sb sandbox) {
	p.Helper()
	began := time.Now()
	for {
		a, err := p.ask("POST", "/v2/sandboxes", wanted("base", who), &sb)
		switch {
		case err == nil && a.code == 201:
			p.own(sb, who)
			return sb
		case err != nil || a.code != 503 || time.Since(began) > s.Config.Timeout(time.Minute):
			p.Errorf("create for %q, after %v: %d %s, %v", who, time.Since(began), a.code, a.message, err)
			return sandbox{}
		}
		p.Logf("create for %q: %s", who, a.message)
		wait, err := strconv.Atoi(a.again)
		if err != nil {
			p.Errorf("Retry-After is %q", a.again)
		}
		time.Sleep(time.Duration(wait) * time.Second) // as long as he is told to
	}
}

// identity tells who a sandbox is. Of its memory it takes note that somebody has been there, which is an error if somebody was.
const identity = `set -C; echo "$WHO" > /dev/shm/taken && cat /run/e2b/.E2B_SANDBOX_ID && echo " $E2B_SANDBOX_ID $WHO" && hostname && cat /proc/sys/kernel/random/uuid && (cat /etc/machine-id 2>/dev/null || true)`

// own sees that a new sandbox is what was asked for, and that nobody has had it, or what makes it unlike others, before.
func (p *pooled) own(sb sandbox, who string) {
	p.Helper()
	out, err := p.run(sb, identity)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if err != nil || len(lines) < 3 || lines[0] != fmt.Sprintf("%s %[1]s %s", sb.ID, who) {
		p.Errorf("%s of %q says %q, %v", sb.ID, who, out, err)
		return
	}
	var told struct{ Metadata map[string]string }
	if a, err := p.ask("GET", "/sandboxes/"+sb.ID, nil, &told); err != nil || told.Metadata["who"] != who {
		p.Errorf("%s of %q has the metadata %v: %d %s, %v", sb.ID, who, told.Metadata, a.code, a.message, err)
	}
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	own := map[string]bool{sb.ID: true, sb.Token: true}
	for _, line := range lines[1:] { // one may be the id
		own[line] = true
	}
	for what := range own {
		if p.of.used[what] {
			p.Errorf("%s of %q isn't the first that has %q", sb.ID, who, what)
		}
		p.of.used[what] = true
	}
}

// clear kills all that there is, some of which may be ending.
func (p *pooled) clear() {
	p.Helper()
	for id := range p.list() {
		if code, message, err := p.call("DELETE", "/sandboxes/"+id, nil, nil); err != nil || code != 204 && code != 404 {
			p.Errorf("delete %s: %d %s, %v", id, code, message, err)
		}
	}
}

// members are all that there are.
func (p *pooled) members() []db.Member {
	all := members(p.T)
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	for _, m := range all {
		p.of.seen[m.ID] = true
	}
	return all
}

// ready are the ids of members that can be claimed: of the template base, or of others.
func (p *pooled) ready(base bool) (ids []string) {
	for _, m := range p.members() {
		if m.Ready && (m.Build.Template == p.of.base) == base {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

// whole sees that there are no machines but those that rows say, that nobody has had those that are to come, and that what is reserved
// is for them. No sandbox of the client's is there any more.
func (p *pooled) whole() {
	p.Helper()
	var odd []string
	defer func() {
		if p.Failed() {
			p.Log(strings.Join(odd, "\n"))
		}
	}()
	s.Eventually(p, time.Minute, "what runs to be what is known", func() bool {
		odd = p.odd()
		return len(odd) == 0
	})
}

func (p *pooled) odd() (odd []string) {
	note := func(format string, args ...any) { odd = append(odd, fmt.Sprintf(format, args...)) }
	rows := p.members()
	known := map[string]bool{}
	for _, m := range rows {
		known[m.ID] = true
		p.of.mu.Lock()
		if p.of.used[m.ID] {
			note("%s was a sandbox and is a member again", m.ID)
		}
		p.of.mu.Unlock()
	}
	d, err := db.Open(p.Context(), s.Config.DatabaseFile())
	if err != nil {
		return []string{err.Error()}
	}
	defer d.Close()
	boxes, err := d.SandboxesIn(p.Context())
	if err != nil {
		return []string{err.Error()}
	}
	for _, b := range boxes {
		note("row of sandbox %s, which is %s", b.ID, b.State)
	}
	for what, r := range map[string][]string{
		"task":      strings.Fields(s.Ctr("task", "ls", "-q").Stdout),
		"container": strings.Fields(s.Ctr("container", "ls", "-q", fmt.Sprintf("labels.%q", machines.Label)).Stdout),
	} {
		for _, id := range r {
			if !known[id] {
				note("%s %s without a row", what, id)
			}
		}
		if len(r) != len(known) {
			note("%ss %q of members %v", what, r, known)
		}
	}
	for _, shim := range s.Processes(shims) {
		if !slices.ContainsFunc(rows, func(m db.Member) bool { return strings.Contains(shim.Command, m.ID) }) {
			note("%v, of no member", shim)
		}
	}
	p.of.mu.Lock()
	for id := range p.of.seen {
		if pid := machineOf(id); pid != 0 && !known[id] {
			note("process %d is the machine of %s, which is no member", pid, id)
		}
	}
	p.of.mu.Unlock()
	spare, reserved := p.metric("cube_admission_spare", "memory"), p.metric(memoryReserved, "memory")
	if want := p.of.each * float64(len(rows)); p.of.each > 0 && (spare != want || reserved-spare != p.of.reserved) {
		note("%.0f bytes are spare and %.0f reserved, of %d members with %.0f each, and %.0f before", spare, reserved, len(rows), p.of.each, p.of.reserved)
	}
	return odd
}

const shims = "containerd-shim-cube-v2"

// shimOf is the process that attends to a machine, 0 if there is none.
func shimOf(id string) int {
	for _, p := range s.Processes(shims) {
		if strings.Contains(p.Command, id) {
			return p.PID
		}
	}
	return 0
}

// machineOf is the process that is a machine, 0 if there is none. Nothing in it tells of which stack it is, but ids are random.
func machineOf(id string) int {
	commands, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range commands {
		command, _ := os.ReadFile(file) // or it has ended
		if bytes.Contains(command, []byte("qemu-system")) && bytes.Contains(command, []byte("\x00-name\x00"+id+"\x00")) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			return pid
		}
	}
	return 0
}

// ears hear of containerd's tasks, until the test ends.
type ears struct {
	*testing.T
	heard chan string // "start ID"
}

func listens(t *testing.T) ears {
	t.Helper()
	c, err := containerd.New(s.Config.ContainerdSocket())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(context.Background(), s.Config.Containerd.Namespace))
	t.Cleanup(func() { cancel(); c.Close() })
	e := ears{t, make(chan string, 1000)}
	told, failed := c.Subscribe(ctx, `topic~="^/tasks/"`)
	go func() {
		for {
			select {
			case env := <-told:
				v, err := typeurl.UnmarshalAny(env.Event)
				if err != nil {
					continue
				}
				switch v := v.(type) {
				case *events.TaskStart:
					e.heard <- "start " + v.ContainerID
				case *events.TaskPaused:
					e.heard <- "paused " + v.ContainerID
				case *events.TaskResumed:
					e.heard <- "resumed " + v.ContainerID
				case *events.TaskExit:
					e.heard <- "exit " + v.ContainerID
				}
			case <-failed: // it has died
				return
			}
		}
	}()
	return e
}

// until waits for an event of one of those, and returns which.
func (e ears) until(what string, ids ...string) string {
	e.Helper()
	late := time.After(s.Config.Timeout(time.Minute))
	for {
		select {
		case said := <-e.heard:
			kind, id, _ := strings.Cut(said, " ")
			if kind == what && slices.Contains(ids, id) {
				return id
			}
		case <-late:
			e.Fatalf("nobody says %s of %q", what, ids)
		}
	}
}
