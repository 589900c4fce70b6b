package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/cubesandbox/cube/vmm"
	"github.com/cubesandbox/cube/vmm/qmp"
	"github.com/cubesandbox/cube/vmm/record"
)

const (
	// drainTimeout is how long the last words of a process that has ended may take. They are in socket buffers.
	drainTimeout = time.Second
	// quitTimeout is how long QEMU may take to quit: it finishes what it is writing to the disks.
	quitTimeout = 2 * time.Second
	// killTimeout is how long a killed process may take to be gone: a system call that can't be interrupted holds it.
	killTimeout = 10 * time.Second
	// spaceRetry is the pause between two attempts to go on after the store was full: nothing tells when it no longer is.
	spaceRetry = time.Second
)

// watch is the one place where the end of a machine is noticed.
func (m *Machine) watch(eventsDone <-chan struct{}) {
	select {
	case <-m.proc.Done():
	case <-m.qmp.Done():
		// A process that ends closes its monitor first. One that goes on without has broken the protocol.
		if errors.Is(m.qmp.Err(), qmp.ErrProtocol) {
			m.destroy(m.qmp.Err().Error())
		}
		select {
		case <-m.proc.Done():
		case <-time.After(m.driver.cfg.Timeout(quitTimeout)):
			m.destroy("QEMU has closed its monitor but goes on")
		}
		<-m.proc.Done()
	}
	late := time.After(m.driver.cfg.Timeout(drainTimeout))
	for _, c := range append(m.drained, eventsDone) {
		select {
		case <-c:
		case <-late:
		}
	}
	m.qmp.Close()
	if !m.stopped.Load() {
		m.err = &vmm.DeathError{Reason: m.reason(), Console: m.Tail(), Killed: m.proc.Killed()}
	}
	close(m.done)
}

// destroy ends a machine that can't be talked to.
func (m *Machine) destroy(why string) {
	m.mu.Lock()
	m.broken = why
	m.mu.Unlock()
	m.proc.Kill()
}

// reason says how the process ended, in terms of the guest where it did that.
func (m *Machine) reason() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != "" {
		return m.broken
	}
	switch m.shutdown { // ShutdownCause, qapi/run-state.json
	case "guest-shutdown":
		return "guest powered off"
	case "guest-panic":
		return "guest panicked"
	case "guest-reset":
		if bytes.Contains(m.console.Bytes(), []byte("Kernel panic - not syncing")) {
			return "guest panicked"
		}
		return "guest reset itself"
	}
	return "QEMU ended: " + m.proc.Status()
}

// handle is called for each event, one after the other.
func (m *Machine) handle(e qmp.Event) {
	var data struct {
		Reason  string `json:"reason"`    // SHUTDOWN
		Device  string `json:"device"`    // DEVICE_DELETED
		Node    string `json:"node-name"` // BLOCK_IO_ERROR
		Action  string `json:"action"`
		NoSpace bool   `json:"nospace"`
	}
	if err := json.Unmarshal(e.Data, &data); err != nil {
		m.log.Warn("QEMU sent an event that can't be read", "event", e.Name, "err", err)
		return
	}
	switch e.Name {
	case "SHUTDOWN":
		m.mu.Lock()
		m.shutdown = data.Reason
		m.mu.Unlock()
	case "DEVICE_DELETED":
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, d := range m.disks {
			if d.id() == data.Device {
				select {
				case <-d.deleted:
				default:
					close(d.deleted)
				}
			}
		}
	case "BLOCK_IO_ERROR":
		if data.Action == "stop" && data.NoSpace {
			m.awaitSpace()
		}
	}
}

// awaitSpace lets a guest that was stopped because the store is full go on. If there is still no space, QEMU stops it
// again and says so again.
func (m *Machine) awaitSpace() {
	if m.waiting.Swap(true) {
		return
	}
	m.tellFull(true)
	go func() {
		if !m.spaceDelay() {
			return
		}
		m.waiting.Store(false)
		release, err := m.change(context.Background()) // a save is bounded, and its end lets the guest go on
		if err != nil {
			return
		}
		defer release()
		ctx, cancel := context.WithTimeout(context.Background(), m.driver.cfg.Timeout(commandTimeout))
		defer cancel()
		if m.paused.Load() { // Resume will let it go on
			return
		}
		err = m.do(ctx, "go on after the store was full", "cont", nil)
		if err == nil && m.paused.Load() { // Pause came in between
			err = m.do(ctx, "pause", "stop", nil)
		}
		if err != nil {
			if !errors.Is(err, vmm.ErrGone) {
				m.log.Warn("the machine can't go on", "err", err)
			}
			return
		}
		// What it was stopped at is written first, so it would have been stopped again by then.
		if m.spaceDelay() && !m.waiting.Load() {
			m.tellFull(false)
		}
	}()
}

// spaceDelay waits for spaceRetry, and tells whether there is still a machine.
func (m *Machine) spaceDelay() bool {
	timer := time.NewTimer(spaceRetry)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-m.done:
		return false
	}
}

// tellFull tells people, when it changes, whether the machine waits for space.
func (m *Machine) tellFull(full bool) {
	if m.full.Swap(full) == full {
		return
	}
	if full {
		m.log.Warn("the store is full: the machine stands still until there is space (cube df, cube prune)")
	} else {
		m.log.Info("the store has space again: the machine goes on")
	}
	if err := record.MarkFull(m.dir, full); err != nil {
		m.log.Warn("note that the store is full", "err", err)
	}
}

// Waiting tells whether the machine stands still because the store is full.
func (m *Machine) Waiting() bool { return m.waiting.Load() }

// Stop ends the machine and frees what it held.
func (m *Machine) Stop(ctx context.Context) error {
	m.stopped.Store(true)
	select {
	case <-m.done:
	case <-ctx.Done():
	}
	return m.end()
}

// end is Stop without waiting for the guest. Whoever comes second waits for the first.
func (m *Machine) end() error {
	m.ending.Do(func() {
		m.stopped.Store(true)
		defer m.agent.Close()
		if m.freed = m.quit(); m.freed == nil {
			m.freed = m.release.Release()
		}
	})
	return m.freed
}

// quit ends the process, if need be by force.
func (m *Machine) quit() error {
	ctx, cancel := context.WithTimeout(context.Background(), m.driver.cfg.Timeout(quitTimeout))
	defer cancel()
	// The answer may get lost in the end that it causes.
	_ = m.qmp.Do(ctx, "quit", nil, nil)
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
	}
	m.proc.Kill()
	select {
	case <-m.done:
		return nil
	case <-time.After(m.driver.cfg.Timeout(killTimeout)):
		return fmt.Errorf("QEMU, process %d, does not end although it was killed", m.PID())
	}
}
