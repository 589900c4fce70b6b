package templates

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/cubesandbox/cube/internal/undo"
	"github.com/cubesandbox/cube/orchestrator/lifecycle"
)

// making is the making of a template: what there is of it so far.
type making struct {
	*Builder
	*plan
	files Files
	tell  Report
	undo  undo.Stack // what isn't needed when it is over, whatever came of it

	disk  string // the snapshot with the disk that comes next; "" is the image's
	whole bool   // the disk has what an image may lack
}

// Make makes the machine snapshot of that name, which nobody else makes, and proves that sandboxes can be made of it. Of what it
// has to do it leaves out what it has done before for the same team. After an error, which is a *Failure where a step has failed,
// there is no such snapshot; what the steps before have come to is kept for the next try. A ctx that ends gives it up.
func (b *Builder) Make(ctx context.Context, r Recipe, files Files, tell Report, snapshot string) (_ Made, err error) {
	began := time.Now()
	b.trim(ctx)
	if r.Artefact != "" {
		return b.pull(ctx, r, tell, snapshot)
	}
	p, err := b.plan(ctx, r, tell)
	if err != nil {
		return Made{}, err
	}
	m := &making{Builder: b, plan: p, files: files, tell: tell, disk: p.Disk, whole: p.Disk != ""}
	defer func() { err = errors.Join(err, m.undo.Release()) }()
	// One machine after the other: the next one isn't made before the one before it is gone.
	done, err := m.admit(ctx, m.DiskMB)
	if err != nil {
		return Made{}, err
	}
	m.undo.Push(func() error { done(); return nil })
	pending, err := m.resume(ctx)
	if err == nil && len(pending) > 0 {
		err = m.run(ctx, pending)
	}
	if err != nil {
		return Made{}, err
	}
	made, err := m.finish(ctx, snapshot)
	if err != nil {
		return Made{}, err
	}
	tell(stepFinal, lifecycle.Info, fmt.Sprintf("ready after %.1f s", time.Since(began).Seconds()))
	return made, nil
}

// machinePrefix is what machines are called by that aren't sandboxes', before a random word.
const machinePrefix = "template-"

// machine is one that the template is made with.
type machine struct {
	id        string
	addr      netip.Addr
	container json.RawMessage // as machines.Begin has it
	// remove removes it. It may be called again.
	remove func() error
}

// begin starts a machine with the disk that there is. u removes it; command is what envd runs beside itself.
func (m *making) begin(ctx context.Context, u *undo.Stack, at place, command ...string) (_ *machine, err error) {
	v := &machine{id: machinePrefix + uuid.NewString()}
	v.remove = m.remover(ctx, v.id)
	u.Push(v.remove)
	env := maps.Clone(m.Env)
	maps.Copy(env, at.Env)
	v.addr, v.container, err = m.Machines.Begin(ctx, lifecycle.Beginning{
		ID: v.id, Team: m.Team, Image: m.Name, Disk: m.disk, Args: initArgs(at, command...), Env: environ(env), CPUs: m.CPUs, MemoryMB: m.MemoryMB, DiskMB: m.DiskMB,
	})
	if err == nil {
		err = m.introduce(ctx, v.addr, lifecycle.Init{})
	}
	return v, err
}

// initArgs are envd's as the first process of a machine.
func initArgs(at place, command ...string) []string {
	args := []string{"init", "-user", at.User, "-workdir", at.Workdir}
	if len(command) > 0 {
		args = append(append(args, "--"), command...)
	}
	return args
}

// remover removes a machine, whatever state it is in, also when ctx has ended.
func (b *Builder) remover(ctx context.Context, id string) func() error {
	return func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Config.Timeout(undoTimeout))
		defer cancel()
		return b.Machines.Kill(ctx, id)
	}
}

// introduce waits for envd to take what it is told.
func (b *Builder) introduce(ctx context.Context, addr netip.Addr, i lifecycle.Init) error {
	ctx, cancel := context.WithTimeout(ctx, b.Config.Timeout(answerTimeout))
	defer cancel()
	if err := b.Guests.Init(ctx, addr, i); err != nil {
		return fmt.Errorf("envd: %w", err)
	}
	return nil
}

// resume takes the disk of the last step that needs not be done again, and returns the steps that are to be done.
func (m *making) resume(ctx context.Context) ([]stage, error) {
	usable := 0
	for usable < len(m.Stages) && !m.Force && !m.Stages[usable].Force {
		usable++
	}
	next := 0
	for i := usable - 1; i >= 0; i-- {
		if !m.Stages[i].Kept {
			continue
		}
		hit, err := m.take(ctx, m.Stages[i].Sum)
		if err != nil {
			return nil, err
		}
		if hit {
			next = i + 1
			break
		}
	}
	if next == 0 && !m.Force && m.disk == "" {
		if _, err := m.take(ctx, m.Sum); err != nil {
			return nil, err
		}
	}
	for _, s := range m.Stages[:next] {
		m.tell(s.Number, lifecycle.Info, "CACHED "+s.String())
	}
	pending := m.Stages[next:]
	for _, s := range pending {
		if s.Type != Env {
			return pending, nil
		}
	}
	return nil, nil // nothing that a machine is needed for
}

// take goes on from a layer, if there is one.
func (m *making) take(ctx context.Context, sum string) (bool, error) {
	name, release, err := m.layer(ctx, m.Team, sum)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	m.undo.Push(release)
	m.disk, m.whole = name, true
	return true, nil
}

// keep has the disk of a machine be the one that comes next, and keeps it for others.
func (m *making) keep(ctx context.Context, v *machine, sum string) error {
	name, release, err := m.addLayer(ctx, m.Team, sum, func(name string) (int64, error) { return m.Machines.SaveDisk(ctx, v.id, name, m.disk) })
	m.undo.Push(release)
	if err != nil {
		return err
	}
	m.disk = name
	return nil
}

// run does steps, each in the machine that the first one gets.
func (m *making) run(ctx context.Context, steps []stage) (err error) {
	var u undo.Stack
	defer func() { err = errors.Join(err, u.Release()) }()
	at := steps[0].Before
	v, err := m.begin(ctx, &u, at)
	if err == nil {
		err = m.completed(ctx, v)
	}
	if err == nil {
		err = m.introduce(ctx, v.addr, lifecycle.Init{User: at.User, Workdir: at.Workdir})
	}
	if err != nil {
		return failed(stepBase, err)
	}
	for _, s := range steps {
		began := time.Now()
		m.tell(s.Number, lifecycle.Info, s.String())
		if err := m.do(ctx, v, s); err != nil {
			return err
		}
		if s.Kept && (m.Config.Templates.Cache > 0 || s.Number == m.lastKept()) {
			if err := m.keep(ctx, v, s.Sum); err != nil {
				return failed(s.Number, err)
			}
		}
		m.tell(s.Number, lifecycle.Debug, fmt.Sprintf("done after %.1f s", time.Since(began).Seconds()))
	}
	return nil
}

// lastKept is the number of the step that all goes on from.
func (m *making) lastKept() string {
	number := ""
	for _, s := range m.Stages {
		if s.Kept {
			number = s.Number
		}
	}
	return number
}
