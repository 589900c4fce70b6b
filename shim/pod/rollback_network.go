package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// lines is the network of a machine that another one takes the place of: nothing of the one's gets to the other.
type lines struct {
	*Attachment
	making  *making
	tap     *os.File
	renewed bool // it is the other machine's
}

// quieten has nothing pass from or to the old machine, which stands still, nor to the other one before renew.
func (r *rollback) quieten(ctx context.Context) error {
	if r.old.made.attached == nil {
		return nil
	}
	tap, err := r.old.machine.Tap()
	if err != nil {
		return err
	}
	r.lines = &lines{Attachment: r.old.made.attached, making: r.old.made, tap: tap}
	r.undo.Push(func() error { return r.lines.giveBack(context.WithoutCancel(ctx)) })
	return r.lines.within(ctx, r.lines.hold)
}

// renew lets pass what is the other machine's.
func (r *rollback) renew(ctx context.Context) error {
	if r.lines == nil {
		return nil
	}
	r.lines.renewed = true
	return r.lines.within(ctx, r.lines.Renew)
}

func (l *lines) hold(ctx context.Context) error { return l.Hold(ctx, l.tap) }

// giveBack is for the old machine, which is to go on. What it had open it has no more if the other one has been let go.
func (l *lines) giveBack(ctx context.Context) error {
	again := l.Resume
	if l.renewed {
		again = l.Renew
	}
	return errors.Join(l.within(ctx, l.hold), l.within(ctx, again))
}

// close is for when the rollback is over.
func (l *lines) close() {
	if l != nil {
		_ = l.tap.Close()
	}
}

func (l *lines) within(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, l.making.cfg.Timeout(networkLimit))
	defer cancel()
	if err := f(ctx); err != nil {
		return fmt.Errorf("the pod's network: %w", err)
	}
	return nil
}
