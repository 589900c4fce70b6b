package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// counter is work that can be followed from the outside.
var counter struct {
	sync.Mutex
	disk *os.File
	n    uint64
	err  error
}

func count(serial string) error {
	dev, err := until(func() (string, error) { return findDisk(serial) })
	if err != nil {
		return err
	}
	f, err := os.OpenFile(dev, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	counter.disk = f
	go func() {
		for ; ; time.Sleep(2 * time.Millisecond) {
			counter.Lock()
			counter.n++
			var b [8]byte
			binary.BigEndian.PutUint64(b[:], counter.n)
			if _, err := f.WriteAt(b[:], 0); err != nil {
				counter.err = err
			}
			counter.Unlock()
		}
	}()
	return nil
}

func counted(more string) (string, error) {
	than, _ := strconv.ParseUint(more, 10, 64)
	_, err := until(func() (any, error) {
		counter.Lock()
		defer counter.Unlock()
		if counter.n <= than {
			return nil, fmt.Errorf("it counts %d", counter.n)
		}
		return nil, nil
	})
	if err != nil {
		return "", err
	}
	counter.Lock()
	defer counter.Unlock()
	var b [8]byte
	if _, err := counter.disk.ReadAt(b[:], 0); err != nil {
		return "", err
	}
	return strconv.FormatUint(counter.n, 10) + " " + strconv.FormatUint(binary.BigEndian.Uint64(b[:]), 10), counter.err
}

// twins are two memories that are equal but for the moment between two writes.
var twins struct{ written, differed atomic.Int64 }

func keepTwins(size int) {
	a, b := make([]byte, size), make([]byte, size)
	const page = 4096
	for n := uint64(1); ; n++ {
		at := int(n * 7919 % uint64(size/page) * page)
		if binary.NativeEndian.Uint64(a[at:]) != binary.NativeEndian.Uint64(b[at:]) {
			twins.differed.Add(1)
		}
		binary.NativeEndian.PutUint64(a[at:], n)
		binary.NativeEndian.PutUint64(b[at:], n)
		twins.written.Add(1)
	}
}

func twinned(more string) (string, error) {
	than, _ := strconv.ParseInt(more, 10, 64)
	n, err := until(func() (int64, error) {
		n := twins.written.Load()
		if n <= than {
			return n, fmt.Errorf("written %d times", n)
		}
		return n, nil
	})
	return fmt.Sprint(n, " ", twins.differed.Load()), err
}
