package e2b

import (
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// poolSteps are those of a member's life, with the victims of each that the short form has, too.
var poolSteps = []struct {
	name string
	come func(*pooled, ears) moment
	// machine: there is one then.
	machine bool
	short   []string
}{
	{"noted", (*pooled).noted, false, nil},
	{"started", (*pooled).started, true, nil},
	{"exercised", (*pooled).exercised, true, []string{"cube", "shim"}},
	{"held", (*pooled).heldStill, true, nil},
	{"ready", (*pooled).toBeClaimed, true, nil},
	{"asked for", (*pooled).askedFor, true, nil},
	{"claimed", (*pooled).claimed, true, nil},
	{"gone on", (*pooled).goneOn, true, nil},
	{"unwanted", (*pooled).unwanted, true, nil},
	{"ended", (*pooled).ended, false, nil},
}

// TestPoolKills kills what serves the pool, one process at each step of a member's life. Whatever it hits: no machine is had by two,
// none is left, what is reserved is for what there is, and whoever wants a sandbox gets one, as well as who was amid it, if cube lives.
func TestPoolKills(t *testing.T) {
	p := newPooled(t, 2)
	for _, step := range poolSteps {
		for _, victim := range []string{"cube", "containerd", "proxy", "shim", "machine"} {
			if !step.machine && (victim == "shim" || victim == "machine") || !long() && !slices.Contains(step.short, victim) {
				continue
			}
			t.Run(step.name+"/"+victim, func(t *testing.T) { p.with(t).killed(step.come, victim) })
		}
	}
}

// moment is where a step has come to.
type moment struct {
	// ids are the members that it is about; leaving: there may be less of them by now.
	ids     []string
	leaving bool
	// made is what was created on the way there.
	made []asked
	// under tells what has become of what was asked for meanwhile, nil if nothing was.
	under <-chan asked
	// after is called when the victim is dead, nil for nothing.
	after func()
}

// asked is what a request has come to.
type asked struct {
	reply
	who string  // wants a sandbox
	sb  sandbox // if he has it
}

// asks asks for something meanwhile.
func (p *pooled) asks(method, path string, body any, who string) <-chan asked {
	under := make(chan asked, 1)
	go func() {
		defer close(under)
		a := asked{who: who}
		a.path = path
		var into any
		if who != "" {
			into = &a.sb
		}
		a.answer, a.err = p.ask(method, path, body, into)
		under <- a
	}()
	return under
}

// wants asks for a sandbox meanwhile.
func (p *pooled) wants() <-chan asked {
	who := p.Name() + " amid it"
	return p.asks("POST", "/v2/sandboxes", wanted("base", who), who)
}

// killed kills a victim at a step.
func (p *pooled) killed(come func(*pooled, ears) moment, victim string) {
	s.Eventually(p, time.Minute, "members", func() bool { return len(p.ready(true)) == 2 })
	at := come(p, listens(p.T))
	p.kill(victim, at)
	if at.after != nil {
		at.after()
	}
	if victim == "cube" {
		victims(false)[0].returns(p.T)
	}
	p.serves()
	s.Eventually(p, time.Minute, "the proxy", func() bool {
		c, err := dial(p.Context(), "tcp", s.Config.Proxy.Listen.String())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	began := time.Now()
	each([]string{"one", "other"}, func(who string) { p.gets(p.Name() + " " + who) })
	p.Logf("two creates after that took %v", time.Since(began).Round(time.Millisecond))
	if at.under != nil {
		a := <-at.under
		p.Log("amid it:", a)
		// What is killed when it is somebody's already is like any that ends by itself.
		killed := (victim == "shim" || victim == "machine") && slices.Contains(at.ids, a.sb.ID)
		switch {
		case victim == "cube" && a.err != nil, a.code == 204:
		case a.err != nil || a.code != 201:
			p.Errorf("amid it: %s", a)
		case !killed:
			at.made = append(at.made, a)
		}
	}
	for _, a := range at.made {
		p.own(a.sb, a.who)
	}
	p.clear()
	p.whole()
}

// kill kills a victim, and what it is of those members.
func (p *pooled) kill(name string, at moment) {
	p.Helper()
	all := victims(true)
	if i := slices.IndexFunc(all, func(v victim) bool { return v.name == name }); i >= 0 {
		all[i].dies(p.T)
		return
	}
	of := map[string]func(string) int{"shim": shimOf, "machine": machineOf}[name]
	for _, id := range at.ids {
		pid := of(id)
		if pid == 0 && !at.leaving {
			p.Fatalf("there is no %s of %s", name, id)
		}
		if pid != 0 {
			s.End(p, pid, unix.SIGKILL)
		}
	}
}

// stops has the machines of members stand still from outside, until goOn.
func (p *pooled) stops(ids ...string) (goOn func()) {
	p.Helper()
	var pids []int
	for _, id := range ids {
		pid := machineOf(id)
		if pid == 0 {
			p.Fatalf("there is no machine of %s", id)
		}
		pids = append(pids, pid)
	}
	signal := func(sig unix.Signal) {
		for _, pid := range pids {
			if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				p.Error(err)
			}
		}
	}
	signal(unix.SIGSTOP)
	return func() { signal(unix.SIGCONT) }
}

// noted: a member is going to be made in the place of one that was claimed.
func (p *pooled) noted(ears) (at moment) {
	before := p.members()
	who := p.Name() + " before it"
	at.made = []asked{{who: who, sb: p.create(wanted("base", who))}}
	s.Eventually(p, time.Minute, "a member that is made", func() bool {
		for _, m := range p.members() {
			if !slices.ContainsFunc(before, func(b db.Member) bool { return b.ID == m.ID }) {
				at.ids = []string{m.ID}
			}
		}
		return len(at.ids) > 0
	})
	return at
}

// started: its machine is.
func (p *pooled) started(e ears) moment {
	at := p.noted(e)
	s.Eventually(p, time.Minute, "its machine", func() bool { return machineOf(at.ids[0]) != 0 })
	return at
}

// exercised: its machine is there, and is told to do what a sandbox does first.
func (p *pooled) exercised(e ears) moment {
	at := p.noted(e)
	e.until("start", at.ids...)
	return at
}

// heldStill: it has come to rest, which isn't written down yet.
func (p *pooled) heldStill(e ears) moment {
	at := p.noted(e)
	e.until("paused", at.ids...)
	return at
}

// toBeClaimed: all are ready.
func (p *pooled) toBeClaimed(ears) moment { return moment{ids: p.ready(true)} }

// askedFor: a create has found one, and can't write it down as its own yet.
func (p *pooled) askedFor(ears) moment {
	d, err := sql.Open("sqlite", "file:"+s.Config.DatabaseFile()+"?_txlock=immediate&_pragma=busy_timeout(10000)")
	if err != nil {
		p.Fatal(err)
	}
	at := moment{ids: p.ready(true)}
	spare := p.metric("cube_admission_spare", "memory")
	tx, err := d.BeginTx(p.Context(), nil) // who writes waits for its end
	if err != nil {
		p.Fatal(err)
	}
	at.after = func() {
		if err := errors.Join(tx.Rollback(), d.Close()); err != nil {
			p.Error(err)
		}
	}
	at.under = p.wants()
	s.Eventually(p, 8*time.Second, "a create that has found a member", func() bool { return p.metric("cube_admission_spare", "memory") < spare })
	return at
}

// claimed: it is a sandbox, and doesn't go on yet.
func (p *pooled) claimed(ears) moment {
	ids := p.ready(true)
	goOn := p.stops(ids...)
	under := p.wants()
	var claimed []string
	s.Eventually(p, time.Minute, "a claim", func() bool {
		left := p.ready(true)
		claimed = slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return slices.Contains(left, id) })
		return len(claimed) > 0
	})
	return moment{ids: claimed, under: under, after: goOn}
}

// goneOn: it goes on, and isn't told yet who it is, or has just been.
func (p *pooled) goneOn(e ears) moment {
	ids := p.ready(true)
	under := p.wants()
	id := e.until("resumed", ids...)
	return moment{ids: []string{id}, under: under, after: p.stops(id)}
}

// unwanted: its template is being deleted.
func (p *pooled) unwanted(e ears) moment {
	from := p.create(wanted("base", "to be a template"))
	var made struct {
		ID string `json:"snapshotID"`
	}
	p.do("POST", "/sandboxes/"+from.ID+"/snapshots", nil, &made, 201)
	p.create(wanted(made.ID, "who wants more"))
	at := moment{leaving: true}
	s.Eventually(p, time.Minute, "a member of another template", func() bool { at.ids = p.ready(false); return len(at.ids) == 1 })
	p.killAll()
	at.under = p.asks("DELETE", "/templates/"+strings.ReplaceAll(made.ID, ":", "%3A"), nil, "")
	s.Eventually(p, time.Minute, "a member that nobody can ask for", func() bool {
		all := p.members()
		i := slices.IndexFunc(all, func(m db.Member) bool { return m.ID == at.ids[0] })
		return i < 0 || all[i].Stale
	})
	return at
}

// ended: of one that is unwanted there is no machine any more.
func (p *pooled) ended(e ears) moment {
	at := p.unwanted(e)
	e.until("exit", at.ids...)
	return at
}
