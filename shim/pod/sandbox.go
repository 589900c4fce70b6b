package pod

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/internal/config"
	"github.com/cubesandbox/cube/shim/spec"
)

// pingLimit is how long the agent may take to say that it is there.
const pingLimit = 2 * time.Second

var errNoMachine = errdefs.ErrFailedPrecondition.WithMessage("the pod has no virtual machine of its own: its sandbox is not started")

// MachineRequest asks for a machine that is the pod's own.
type MachineRequest struct {
	spec.Machine
	NetNS    string // as in vmm.Request
	Hostname string // "" for the pod's id
	// ConfigFile is the configuration to use, "" for the default one.
	ConfigFile string
}

// Reserve keeps the pod for a machine of its own: no container makes one any more, and all get what c has.
func (p *Pod) Reserve(c spec.Common) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.common != nil || p.machine != nil || len(p.slots) > 0 {
		return errdefs.ErrAlreadyExists.WithMessage("the pod is in use already")
	}
	p.common = &c
	return nil
}

func (p *Pod) reserved() *spec.Common {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.common
}

// StartMachine makes the machine of a reserved pod before there is any container. It is there until StopMachine, or until
// it dies. After an error nothing is left.
func (p *Pod) StartMachine(ctx context.Context, r MachineRequest) (pid int, err error) {
	cfg, err := config.Load(r.ConfigFile)
	if err != nil {
		return 0, errdefs.ErrInvalidArgument.WithMessage(err.Error())
	}
	m, err := p.own()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()

	k := p.newMaking(cfg, r.ConfigFile, r.Machine, r.NetNS)
	if r.Hostname != "" {
		k.hostname = r.Hostname
	}
	k.state.Sandbox = true
	v, err := k.make(ctx)
	if err != nil {
		p.hasNot(m, err)
		return 0, err
	}
	p.has(m, v)
	return v.PID(), nil
}

// own makes the machine that is to be made the pod's.
func (p *Pod) own() (*machine, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return nil, errShuttingDown
	}
	if p.common == nil {
		return nil, errdefs.ErrFailedPrecondition.WithMessage("the pod is not reserved for a virtual machine of its own")
	}
	if p.machine != nil {
		return nil, errdefs.ErrAlreadyExists.WithMessage("the pod has a virtual machine already")
	}
	p.machine = &machine{ready: make(chan struct{}), sandbox: true, users: 1}
	return p.machine, nil
}

// make takes all steps, for a machine without a container.
func (k *making) make(ctx context.Context) (*vm, error) {
	if err := k.claim(ctx); err != nil {
		return nil, err
	}
	err := k.launch(ctx, nil)
	if err == nil {
		_, err = k.identify(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, k.release())
	}
	return k.vm, nil
}

// StopMachine ends a machine that StartMachine has made, and with it whatever runs in it, and waits for all exits.
// Idempotent, and fine without a machine.
func (p *Pod) StopMachine(ctx context.Context) error {
	m := p.sandbox()
	if m == nil {
		return nil
	}
	v, err := p.await(ctx, m)
	if err == nil {
		err = p.goesOn(ctx, v.timeout(killLimit), "the pod is to be stopped")
	}
	if err == nil {
		v, err = p.await(ctx, m) // it may have been put back
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	m.ended = true
	p.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- p.stop(v) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *Pod) sandbox() *machine {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.machine == nil || !p.machine.sandbox {
		return nil
	}
	return p.machine
}

// MachineStatus is what there is to tell of the pod's machine.
type MachineStatus struct {
	PID   int
	Since time.Time
	// Exit is nil as long as the machine is there.
	Exit *Exit
}

// Machine tells from memory of a machine that StartMachine has made; false before that.
func (p *Pod) Machine() (MachineStatus, bool) {
	m := p.sandbox()
	if m == nil {
		return MachineStatus{}, false
	}
	p.mu.Lock()
	v := m.vm
	p.mu.Unlock()
	if v == nil {
		return MachineStatus{}, false
	}
	s := MachineStatus{PID: v.PID(), Since: v.since}
	if v.isDown() {
		s.Exit = &Exit{Status: v.lost, At: v.lostAt}
	}
	return s, true
}

// WaitMachine waits for the end of such a machine.
func (p *Pod) WaitMachine(ctx context.Context) (Exit, error) {
	m := p.sandbox()
	if m == nil {
		return Exit{}, errNoMachine
	}
	v, err := p.await(ctx, m)
	if err != nil {
		return Exit{}, err
	}
	select {
	case <-v.down:
		p.mu.Lock()
		replaced := m.vm != v
		p.mu.Unlock()
		if replaced {
			return p.WaitMachine(ctx)
		}
		return Exit{Status: v.lost, At: v.lostAt}, nil
	case <-ctx.Done():
		return Exit{}, ctx.Err()
	}
}

// PingMachine asks the agent of such a machine whether it is there.
func (p *Pod) PingMachine(ctx context.Context) error {
	v, err := p.running()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, v.timeout(pingLimit))
	defer cancel()
	if err := v.guest.SyncTime(ctx); err != nil && !v.held.Load() {
		return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the agent of the pod's virtual machine doesn't answer: %v", v.explain(err)))
	}
	return nil
}

// MachineStats returns what all containers in such a machine use, an encoded io.containerd.cgroups.v2.Metrics.
func (p *Pod) MachineStats(ctx context.Context) ([]byte, error) {
	v, err := p.running()
	if err != nil {
		return nil, err
	}
	r, err := v.guest.Stats(ctx, &api.ContainerRequest{})
	if err != nil {
		return nil, fmt.Errorf("metrics of the pod: %w", v.explain(err))
	}
	return r.GetMetrics(), nil
}

// running is the machine of the pod's own that can be asked something.
func (p *Pod) running() (*vm, error) {
	m := p.sandbox()
	if m == nil {
		return nil, errNoMachine
	}
	p.mu.Lock()
	v := m.vm
	p.mu.Unlock()
	switch {
	case v == nil:
		return nil, errNoMachine
	case v.isDown():
		return nil, errdefs.ErrUnavailable.WithMessage("the pod's virtual machine has ended")
	}
	return v, nil
}

// Clear deletes all containers of a machine that has been stopped.
func (p *Pod) Clear(ctx context.Context) error {
	var errs []error
	for _, id := range p.ids() {
		if _, _, err := p.Delete(ctx, id, ""); err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (p *Pod) ids() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.slots))
}
