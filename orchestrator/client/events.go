package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// silence is after which a stream of events is taken for dead: several times what the API lets pass.
	silence = time.Minute
	// eventLimit bounds an event, in bytes.
	eventLimit = 32 << 20
)

const (
	// A stream that has broken off is asked for again after firstRetry, then more and more seldom, until gaveUp has passed.
	firstRetry = 100 * time.Millisecond
	lastRetry  = 5 * time.Second
	gaveUp     = 5 * time.Minute
)

// event is one of a stream's.
type event struct {
	name string
	id   string // by which another stream goes on after it; "" if none can
	data []byte
}

// follow is listen for a stream that is begun anew when it breaks off, after the last event that had an id, as long as again agrees:
// not one that never was, nor one that can't be had for long.
func (c *Client) follow(ctx context.Context, path string, query url.Values, again func() bool, each func(event) error) error {
	delay, lost := firstRetry, time.Time{}
	last, ever := "", false
	for {
		began, opened, heard := time.Now(), false, false
		err := c.listen(ctx, path, query, last, func() { opened, ever = true, true }, func(e event) error {
			heard = true
			if err := each(e); err != nil {
				return err
			}
			if e.id != "" {
				last = e.id
			}
			return nil
		})
		if heard || opened && time.Since(began) > lastRetry {
			delay, lost = firstRetry, time.Time{}
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		if !ever || !again() || ctx.Err() != nil || !errdefs.IsUnavailable(err) || time.Since(lost) > c.o.Timeout(gaveUp) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(delay):
		}
		delay = min(2*delay, lastRetry)
	}
}

// listen calls each with the events of a stream of the API's, after the one whose id is last, until it says that it has told all, ctx
// ends, or each fails. It calls opened when there is a stream. One that breaks off is errdefs.ErrUnavailable.
func (c *Client) listen(ctx context.Context, path string, query url.Values, last string, opened func(), each func(event) error) error {
	broke := errdefs.ErrUnavailable.WithMessage("the API has fallen silent")
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	alive := time.AfterFunc(c.o.Timeout(silence), func() { cancel(broke) })
	defer alive.Stop()
	header := http.Header{}
	if last != "" {
		header.Set("Last-Event-ID", last)
	}
	resp, err := c.ask(ctx, path, query, header)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	opened()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, eventLimit)
	var e event
	for lines.Scan() {
		alive.Reset(c.o.Timeout(silence))
		line := lines.Text()
		field, value, _ := strings.Cut(line, ": ")
		switch field {
		case "id":
			e.id = value
			continue
		case "event":
			e.name = value
			continue
		case "data":
		default:
			continue
		}
		told := e
		told.data, e = []byte(value), event{}
		switch told.name {
		case "end":
			return nil
		case "error":
			return failure(told.data)
		}
		if err := each(told); err != nil {
			return err
		}
	}
	err = lines.Err()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return fmt.Errorf("an event of the API's has more than %d bytes", eventLimit)
	case err == nil:
		err = io.ErrUnexpectedEOF
	}
	return errdefs.ErrUnavailable.WithMessage(fmt.Sprintf("the API's stream of events has broken off: %v", err))
}

// failure is the error that the API ends a stream with.
func failure(data []byte) error {
	var e struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("an event of the API's: %w", err)
	}
	return classed(e.Code, "the API", e.Message)
}
