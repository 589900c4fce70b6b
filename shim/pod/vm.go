package pod

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/cubesandbox/cube/guest-agent/api"
	"github.com/cubesandbox/cube/shim/guest"
	"github.com/cubesandbox/cube/vmm"
)

const (
	// timeInterval is how often the guest's clock is corrected; a tenth of it is left to chance, so that many machines
	// don't do it at once.
	timeInterval = time.Minute
	// silenceRetries is how often in a row the agent may leave a call unanswered before the machine is given up.
	silenceRetries = 3
	// panicGrace is how long a machine whose agent channel has ended has to end by itself and say why.
	panicGrace = 2 * time.Second
	// unplugLimit is how long the guest may take to let disks go that it has unmounted.
	unplugLimit = 5 * time.Second
)

// vm is the machine with its agent. It has one latch, down: closed when the machine is of no use any more, for whatever
// reason. After it nothing asks the guest.
type vm struct {
	machine vmm.Machine
	guest   *guest.Guest
	made    *making // what it is of
	log     *slog.Logger
	timeout func(time.Duration) time.Duration

	down   chan struct{}
	since  time.Time
	lost   uint32 // the exit status of what was running when it went down; read after down, as lostAt
	lostAt time.Time
	// lastEvent is the number of the last event of the agent's that has been handled.
	lastEvent atomic.Uint64
	// asleep: it is of a snapshot, and nothing of the work in it has run since.
	asleep atomic.Bool
	// held: a save, a rollback or a hold has it stand still.
	held atomic.Bool
	// kept: it is a hold, which has stopped its CPUs.
	kept atomic.Bool
	// ended says that this shim ends the machine, on purpose.
	ended   atomic.Bool
	stopped chan struct{} // closed when stop has finished
	once    sync.Once
	stopErr error                  // read after stopped
	forced  atomic.Pointer[string] // why this shim has ended it by force, if it has
	strange sync.Once              // an event that is logged no more than once
	// undone is called when nothing is left of the machine, and returns when nothing is left of what was its own.
	undone func() error
}

func newVM(m vmm.Machine, g *guest.Guest, log *slog.Logger, timeout func(time.Duration) time.Duration, undone func() error) *vm {
	v := &vm{machine: m, guest: g, log: log, timeout: timeout, since: time.Now(), undone: undone, down: make(chan struct{}), stopped: make(chan struct{})}
	go v.watch()
	go v.keepTime()
	return v
}

// PID is the machine's, which is the pid of all its processes for containerd.
func (v *vm) PID() int { return v.machine.PID() }

// isDown tells whether the machine is of no use any more.
func (v *vm) isDown() bool {
	select {
	case <-v.down:
		return true
	default:
		return false
	}
}

// watch closes the latch.
func (v *vm) watch() {
	v.awaitEnd()
	v.lost, v.lostAt = v.status(), time.Now()
	if !v.ended.Load() {
		v.log.Error("the virtual machine is down", "reason", v.why())
	}
	close(v.down)
}

func (v *vm) awaitEnd() {
	select {
	case <-v.machine.Done():
		return
	case <-v.guest.Done():
	}
	if v.guest.Broken() {
		return
	}
	// A guest that panics loses the channel first; the machine then ends and tells why.
	timer := time.NewTimer(v.timeout(panicGrace))
	defer timer.Stop()
	select {
	case <-v.machine.Done():
	case <-timer.C:
		if !v.ended.Load() {
			v.log.Error("the agent channel has ended, so the machine is ended too", "error", v.guest.Err())
		}
	}
}

// status is the exit status of what is running when the machine goes down.
func (v *vm) status() uint32 {
	var death *vmm.DeathError
	if v.ended.Load() || errors.As(v.machine.Err(), &death) && death.Killed {
		return statusKilled
	}
	return statusLost
}

// why says in one line how the machine went down.
func (v *vm) why() error {
	if v.guest.Broken() {
		return v.guest.Err() // what the machine dies of then is a consequence
	}
	if reason := v.forced.Load(); reason != nil {
		return errdefs.ErrUnavailable.WithMessage("the virtual machine is ended, since " + *reason)
	}
	if err := v.machine.Err(); err != nil {
		return err
	}
	return v.guest.Err()
}

// explain gives an error that says no more than that this machine is gone the reason why it is.
func (v *vm) explain(err error) error {
	if !errors.Is(err, guest.ErrGone) && !errors.Is(err, vmm.ErrGone) {
		return err
	}
	<-v.down // bounded by watch
	if why := v.why(); why != nil {
		return why
	}
	return err
}

// keepTime corrects the guest's clock, and gives up a machine whose agent doesn't answer.
func (v *vm) keepTime() {
	silent := 0
	for {
		wait := v.timeout(timeInterval) - rand.N(v.timeout(timeInterval)/10)
		if silent > 0 {
			wait = 0 // the call itself took its deadline
		}
		timer := time.NewTimer(wait)
		select {
		case <-v.down:
			timer.Stop()
			return
		case <-timer.C:
		}
		if v.held.Load() {
			continue
		}
		err := v.guest.SyncTime(context.Background())
		if !errors.Is(err, context.DeadlineExceeded) || v.machine.Waiting() || v.held.Load() {
			silent = 0
			continue
		}
		if silent++; silent == silenceRetries {
			v.kill(fmt.Sprintf("its agent has not answered %d times in a row", silent))
			return
		}
	}
}

// answers tells whether the agent does, within the limit.
func (v *vm) answers(limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), v.timeout(limit))
	defer cancel()
	return v.guest.SyncTime(ctx) == nil
}

// wake lets the work in a machine that is of a snapshot go on. Idempotent.
func (v *vm) wake(ctx context.Context) error {
	if !v.asleep.Load() {
		return nil
	}
	err := v.guest.Thaw(ctx)
	v.asleep.Store(false) // also without an answer it may run
	return err
}

// letGoOn tries again what a save has tried last, to have the work in the guest go on, and ends a machine in which it doesn't.
func (v *vm) letGoOn() {
	for failed := 0; failed < silenceRetries; failed++ {
		err := v.guest.Thaw(context.Background())
		if err == nil || v.isDown() {
			return
		}
		v.log.Warn("the work in the guest still stands still after a save", "error", err)
		if errors.Is(err, context.DeadlineExceeded) && v.machine.Waiting() {
			failed = 0 // the call itself took its deadline
		}
	}
	v.kill("its agent doesn't let the work in it go on after a save")
}

// stop ends the machine in order, once, and waits for it: the guest kills what runs, syncs and unmounts before the power
// goes. Nothing is left afterwards if the error is nil.
func (v *vm) stop() error {
	v.once.Do(func() {
		v.ended.Store(true)
		defer close(v.stopped)
		began := time.Now()
		select {
		case <-v.down:
		default:
			if v.asleep.Load() || v.kept.Load() {
				break // it has nothing that isn't in the snapshot, or on its disks
			}
			if _, err := v.guest.Shutdown(context.Background(), &emptypb.Empty{}); err != nil {
				v.log.Warn("the guest didn't shut down in order", "error", err)
			}
		}
		quiet := time.Since(began)
		// Whatever it answered, there is nothing to wait for: it has synced and unmounted, or it won't.
		v.end()
		v.log.Debug("machine stopped", "guest", quiet, "all", time.Since(began))
	})
	<-v.stopped
	return v.stopErr
}

// stopWithin stops the machine and waits for that, but no longer than limit.
func (v *vm) stopWithin(limit time.Duration) {
	go v.stop()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-v.stopped:
	case <-timer.C:
	}
}

// kill ends the machine at once, without asking the guest.
func (v *vm) kill(reason string) {
	v.once.Do(func() {
		v.ended.Store(true)
		defer close(v.stopped)
		v.forced.Store(&reason)
		v.log.Error("the machine is ended by force", "reason", reason)
		v.end()
	})
}

// discard ends a machine in which nothing works, not yet or not any more.
func (v *vm) discard() error {
	v.once.Do(func() {
		v.ended.Store(true)
		defer close(v.stopped)
		v.end()
	})
	<-v.stopped
	return v.stopErr
}

// end stops the machine without waiting for the guest.
func (v *vm) end() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	err := v.machine.Stop(ctx)
	v.guest.Close() // always nil
	if err == nil {
		err = v.undone()
	}
	if err != nil {
		v.stopErr = fmt.Errorf("stop the machine: %w", err)
		v.log.Error("stop the machine", "error", err)
	}
}

// takeOut takes a container out of a machine that goes on: the guest kills what is left of it, syncs and unmounts; then
// its disks go, whichever of them there are. All of it may have been done before.
func (v *vm) takeOut(id string, serials []string) error {
	_, err := v.guest.DeleteContainer(context.Background(), &api.ContainerRequest{Id: id})
	if err == nil {
		err = v.unplug(serials)
	}
	if errors.Is(err, guest.ErrGone) || errors.Is(err, vmm.ErrGone) || err != nil && v.isDown() {
		return v.stop() // it has ended meanwhile, and takes everything with it
	}
	if err != nil {
		return fmt.Errorf("take container %s out of the virtual machine: %w", id, err)
	}
	return nil
}

func (v *vm) unplug(serials []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), v.timeout(unplugLimit))
	defer cancel()
	var errs []error
	for _, serial := range serials {
		if err := v.machine.RemoveDisk(ctx, serial); err != nil && !errors.Is(err, vmm.ErrNoDisk) {
			errs = append(errs, fmt.Errorf("unplug root disk %s: %w", serial, err))
		}
	}
	return errors.Join(errs...)
}
